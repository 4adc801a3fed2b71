"""Files that are complete or absent, and locks that end with their process."""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

_umask = os.umask(0o77)  # it can only be read by setting it
os.umask(_umask)
_MODE = 0o666 & ~_umask  # files get the mode that `open` gives them


def write_whole(path: Path, write: Callable[[Path], object], writer: str = "") -> None:
    """Let `write` fill a temporary file next to `path`, then rename it.

    After a kill `path` is the old file or the new one.

    `writer` is in the temporary name, where several processes may write the same file at the same
    time.
    """
    temporary = temporary_of(path, writer)
    if temporary.is_symlink():  # it would be written through, to a file elsewhere
        temporary.unlink()
    try:
        write(temporary)
    except Exception:
        temporary.unlink(missing_ok=True)  # a full disk needs the space
        raise
    # Some writers let nobody else read their files, as in a folder that several users share.
    os.chmod(temporary, _MODE)
    os.replace(temporary, path)


def cache_folder() -> Path:
    """Return the folder for files that may be removed, as they can be made again:
    `$SPECHEADS_CACHE` or `~/.cache/specheads`.
    """
    return Path(os.environ.get("SPECHEADS_CACHE") or Path.home() / ".cache" / "specheads")


_SETTLED = 2.0  # seconds after a change from which on a further one has another time of change
_IS_HASH = re.compile("[0-9a-f]{64}")


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits.

    It is read again only where its size, or what the file system notes of its changes, is another;
    a copy that keeps the old time of change is noticed by that.
    """
    file = file.resolve()
    if _IS_HASH.fullmatch(file.name):  # as the hub's cache calls its large files
        return file.name
    status = file.stat()
    if time.time() - max(status.st_mtime, status.st_ctime) < _SETTLED:
        return checksum(file)
    changes = status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
    return noted("hashes", [str(file), *changes], lambda: checksum(file))


def noted(kind: str, key: Sequence[object], make: Callable[[], Any]) -> Any:
    """Return what `make` returns, plain data that `key` decides; a file of the cache folder keeps
    it for other processes.
    """
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    note = cache_folder() / kind / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # missing or damaged
        kept = read_json(note)
        if kept["sha256"] == _sum_of(kept["value"]):
            return kept["value"]
    value = make()
    text = json.dumps({"value": value, "sha256": _sum_of(value)})
    with contextlib.suppress(OSError):  # a full disk, or a folder that cannot be written
        note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(note, lambda temporary: temporary.write_text(text), str(os.getpid()))
    return value


def _sum_of(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def amount(number: float, billions: str = "GB", millions: str = "MB") -> str:
    """Return a number with three digits in one of two units, "6.74 billion" or "53.3 MB"."""
    return f"{number / 1e9:.3g} {billions}" if number >= 1e9 else f"{number / 1e6:.3g} {millions}"


def space_of(what: str, num_bytes: float, folder: Path) -> str:
    """Return how much disk `what` takes in a folder, which may not exist yet, for the log.

    Warn where less is free.
    """
    free = shutil.disk_usage(
        next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    ).free
    if num_bytes > free:
        logger.warning(
            "%s: only %s are free in %s; choose another folder with paths.data=",
            what,
            amount(free),
            folder,
        )
    return f"about {amount(num_bytes)} on disk"


def without_home(text: str) -> str:
    """Return a text with `~` in place of the user's home folder, whose name is often that of a
    person.
    """
    homes = {
        str(home) for home in (Path.home(), Path.home().resolve()) if home != Path(home.anchor)
    }
    for home in sorted(homes, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text)
    return text


def temporary_of(path: Path, writer: str = "") -> Path:
    """Return the name that a file has until it is complete."""
    return path.with_name(f".{path.name}.{writer}.tmp" if writer else f".{path.name}.tmp")


def write_json(path: Path, content: object, writer: str = "") -> None:
    """Write `content` as a JSON file that is complete or absent; `writer` as for `write_whole`."""
    write_whole(
        path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"), writer
    )


def read_json(path: Path) -> Any:
    """Return the content of a JSON file in UTF-8.

    Raises OSError, and ValueError whose message says what is wrong in it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def lock(path: Path) -> FileLock | None:
    """Return the lock of the file `path`, held until it is released or the process ends.

    None if another process has it.
    """
    held = FileLock(path, mode=0o666, blocking=False, thread_local=False)
    try:
        held.acquire()
    except Timeout:
        return None
    return held


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, as soon as no other process has it.

    The log says if one is waited for. Raises OSError.
    """
    held = lock(folder / ".lock")
    if held is None:
        logger.info("waiting for another process, which is at work in %s", folder)
        held = FileLock(folder / ".lock", mode=0o666, thread_local=False)
        held.acquire()
    try:
        yield
    finally:
        held.release()
