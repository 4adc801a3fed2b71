"""`specheads sync data s3://bucket/data`: copy what is finished to or from another folder or a store."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import yaml
from rich.filesize import decimal

from specheads import interrupts
from specheads.errors import UserError
from specheads.forecast import duration, progress
from specheads.settings import Flag, Settings, fields_of, setting
from specheads.storage.finished import File
from specheads.storage.remote_store import store_at
from specheads.storage.stores import Advance
from specheads.storage.sync import Sync

MOST_LINES = 20  # of what is to be copied, or left out
PLACES = {
    "source": "a folder with data sets, runs, heads or recordings, or one of them: a path, s3://, gs:// or hf://",
    "copy": "the folder that is to hold the same: a path, s3://, gs:// or hf://",
}


class SyncSettings(Settings):
    """How files are copied."""

    verify: Flag = setting(True, "read back what was copied and compare SHA-256; false: compare sizes and manifests")
    overwrite: Flag = setting(False, "replace files that have other content at the destination")
    dry: Flag = setting(False, "only list what would be copied")


SYNC_KEYS = {field.key: f"{field.help}; {str(field.default).lower()}" for field in fields_of(SyncSettings)}


def sync(source: str, copy: str, **keys: str) -> str:
    """Copy what is finished in a folder to another; return what was done.

    Raises:
        UserError: a folder that cannot be read or written, other content at the destination, a damaged shard, once all others
            are copied.
        SystemExit: Ctrl-C or SIGTERM; the same command goes on.
    """
    settings = SyncSettings(**{key: yaml.safe_load(value) for key, value in keys.items()})
    logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    ours, level = logging.getLogger("specheads"), logging.getLogger("specheads").level
    ours.setLevel(logging.INFO)  # unlike the clients of stores, which log every request
    try:
        with interrupts.listening():
            return "\n".join(_lines(source, copy, settings))
    except interrupts.Interrupted as interruption:
        print(f"{interruption}; the same command goes on", file=sys.stderr)
        raise SystemExit(interruption.exit_code) from None
    finally:
        ours.setLevel(level)


def _lines(source: str, copy: str, settings: SyncSettings) -> Iterator[str]:
    start = time.perf_counter()
    task = Sync(store_at(source), store_at(copy), settings.verify, settings.overwrite)
    _with_bar("comparing", task.bytes_to_compare(), task.compare)
    if settings.dry:
        yield from _some([f"{decimal(file.size):>10}  {file.name}" for file in task.to_copy])
        yield f"{_size(task.to_copy)} to copy, {_size(task.same)} there already"
    else:
        _with_bar("copying", task.bytes_to_copy(), task.copy)
        seconds = time.perf_counter() - start
        took = f"{seconds:.1f} s" if seconds < 10 else duration(seconds)
        verified = ", verified by SHA-256" if settings.verify else ""
        yield f"{copy}: {_size(task.copied)} copied in {took}{verified}; {_size(task.same)} there already"
    yield from _some([f"left out: {reason}" for reason in task.content.left_out])
    if task.damaged:
        more = " and more" if len(task.damaged) > 3 else ""
        raise UserError(
            f"{', '.join(task.damaged[:3])}{more}: damaged, as its checksum is another than in the manifest, and not copied; "
            f"{len(task.copied)} other files were. The command that made it makes it again."
        )


def _with_bar(what: str, num_bytes: int, step: Callable[[Advance], None]) -> None:
    with progress(what, num_bytes, of_bytes=True) if num_bytes else nullcontext(lambda count: None) as advance:
        step(advance)


def _size(files: Sequence[File]) -> str:
    return f"{len(files):,} file{'' if len(files) == 1 else 's'} ({decimal(sum(file.size for file in files))})"


def _some(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], *([f"and {more:,} more"] if more > 0 else [])]
