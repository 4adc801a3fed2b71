"""Files that are whole or not there, and locks that end with their process."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it; a kill leaves the old file or the new one."""
    temporary = temporary_of(path)
    try:
        write(temporary)
    except Exception:
        temporary.unlink(missing_ok=True)  # a full disk needs the space, and what was refused is of no use
        raise
    os.replace(temporary, path)


def cache_folder() -> Path:
    """Return where things are kept that can be made anew: `$SPECHEADS_CACHE`, default `~/.cache/specheads`. It may be removed at any time."""
    return Path(os.environ.get("SPECHEADS_CACHE") or Path.home() / ".cache" / "specheads")


def temporary_of(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return path.with_name(f".{path.name}.tmp")


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, whole."""
    write_whole(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"))


def lock(path: Path) -> TextIO | None:
    """Return the open file `path`, locked and holding this process's number, or None where another process has the lock.

    The lock is released by closing the file, or by the system when the process ends, however it ends.
    """
    stream = path.open("a+")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    stream.truncate(0)
    stream.write(str(os.getpid()))
    stream.flush()
    return stream
