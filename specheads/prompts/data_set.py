"""A data set by its path: a file, here or on the web, a folder that `save_to_disk` wrote, or a hub data set; whole, or a split.

Importing this module imports `datasets`, which is slow.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import datasets
from pyarrow import parquet

from specheads.errors import UserError
from specheads.prompts.rows import Table, read_file

logger = logging.getLogger(__name__)

# What `datasets` raises for a data set that is missing, damaged or something else; all of these happen.
UNREADABLE = OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, datasets.exceptions.DatasetsError
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt")
KINDS = "JSON, JSONL, CSV, Parquet or text file"
WEB = ("https://", "http://")


def check_path(path: str) -> None:
    """Raise UserError for a local path that holds nothing to read; nothing is looked up on the hub or the web."""
    if not isinstance(path, str) or not path:
        raise UserError(f"data.path={path!r} must be a path; give a {KINDS}, a folder, or a hub data set.")
    if path.startswith(WEB):
        _check_suffix(path, Path(path).suffix)
        return
    local = Path(os.path.expanduser(path))
    try:
        if local.is_dir():
            _check_folder(path, local)
        elif local.exists():
            _check_file(path, local)
        elif local.suffix.lower() in SUFFIXES or path.startswith(("/", "./", "../", "~")):
            raise UserError(
                f"data.path={path!r}: there is no {local.absolute()}; give a {KINDS}, a folder written by save_to_disk, "
                "or a hub data set."
            )
    except OSError as error:
        raise UserError(f"data.path={path!r} cannot be read ({error.strerror}); check the path and who may read it.") from None


def _check_folder(path: str, folder: Path) -> None:
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise UserError(
            f"data.path={path!r} is a folder, but no data set that save_to_disk wrote; give such a folder, or a single {KINDS}."
        )


def _check_suffix(path: str, suffix: str) -> None:
    if suffix.lower() not in SUFFIXES:
        raise UserError(
            f"data.path={path!r} ends in {suffix or 'no suffix'}, but only {', '.join(SUFFIXES)} are read; "
            "convert it to one of them, or rename it."
        )


def _check_file(path: str, file: Path) -> None:
    _check_suffix(path, file.suffix)
    with file.open("rb") as stream:
        if not stream.read(1):
            raise _no_rows(path)


def check_split(key: str, split: str) -> None:
    """Raise UserError unless `split` reads like "train" or "train[:500]"; whether the data set has it shows when it is loaded."""
    try:
        datasets.ReadInstruction.from_spec(split if isinstance(split, str) else "")
    except ValueError:
        raise UserError(
            f"{key}={split!r} must be the name of a split or a slice of one, for example {key}=train or '{key}=\"train[:500]\"'."
        ) from None


def load_tables(path: str, name: str | None, revision: str | None = None) -> Table | dict[str, Table]:
    """Return the data set: one table where it has no splits (a file, a single saved data set), otherwise a table per split.

    Args:
        path: a local file or folder, the address of a file, or a hub id; `check_path` has nothing against it.
        name: the configuration of a hub data set.
        revision: the commit, tag or branch of a hub data set; None: the newest.

    Raises:
        UserError: contents that cannot be read, no rows, a hub data set or configuration that cannot be had.
    """
    local = Path(os.path.expanduser(path))
    try:
        if path.startswith(WEB):
            local = _downloaded(path)
        if not local.is_file() or Path(path).suffix.lower() == ".parquet":
            with _quiet():
                loaded = _load_with_datasets(path, name, revision, local)
            return Table(loaded) if isinstance(loaded, datasets.Dataset) else {key: Table(rows) for key, rows in loaded.items()}
    except UNREADABLE as error:
        raise _not_loaded(path, name, local.exists(), error) from error
    table = read_file(path, local)
    if not table.rows:
        raise _no_rows(path)
    return table


def _downloaded(address: str) -> Path:
    """Return the local copy of a file of the web, in the cache of `datasets`."""
    logger.info("data: loading %s, from the web or from the cache of an earlier download", address)
    with _quiet():
        return Path(datasets.DownloadManager().download(address))


def _load_with_datasets(
    path: str, name: str | None, revision: str | None, local: Path
) -> datasets.Dataset | datasets.DatasetDict:
    if local.is_dir():
        return datasets.load_from_disk(str(local))
    if local.is_file():
        return datasets.Dataset(datasets.table.InMemoryTable(parquet.read_table(local)))
    logger.info("data: loading %s, from the hub or from the cache of an earlier download", path)
    return datasets.load_dataset(path, name, **({"revision": revision} if revision else {}))


def cut(tables: Table | dict[str, Table], path: str, key: str, split: str) -> list[Table]:
    """Return the tables that a split such as "train[:500]+test" names; a source without splits goes by any name.

    Raises:
        UserError: a split that is not there, or that is empty.
    """
    if isinstance(tables, Table):
        tables = {re.split(r"[\[+(]", split)[0].strip(): tables}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(table.rows) for name, table in tables.items()})
    except ValueError as error:
        raise UserError(f"{key}={split!r} cannot be taken from {path}: {str(error).rstrip('.')}.") from None
    pieces = [tables[part.splitname].part(part.from_, part.to) for part in parts if part.from_ < part.to]
    if not pieces:
        raise UserError(f"{key}={split!r} holds no rows of {path}; widen it, or give a data set with more.")
    return pieces


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars and log messages of `datasets` and its hub client: our messages contain the important parts."""
    hidden = datasets.are_progress_bars_disabled()
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [library.level for library in loggers]
    datasets.disable_progress_bars()
    for library in loggers:
        library.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for library, level in zip(loggers, levels, strict=True):
            library.setLevel(level)
        if not hidden:
            datasets.enable_progress_bars()


def _not_loaded(path: str, name: str | None, is_local: bool, error: Exception) -> UserError:
    """Return the message for a data set that `datasets` did not load."""
    if is_local:
        return UserError(f"data.path={path!r} cannot be read ({_reason(error)}); write it again.")
    if isinstance(error, ValueError):  # it exists, but not with these arguments
        return UserError(
            f"data.path={path!r} with data.name={name} could not be loaded: {_reason(error)}. "
            "Give the data.name of a configuration that it has, or data.name=null."
        )
    if path.startswith(WEB):
        return UserError(
            f"data.path={path!r} could not be loaded: {_reason(error)}. Check the address; without a network, copy the file here "
            "and give data.path=<file>."
        )
    return UserError(
        f"data.path={path!r} is no local file or folder, and as a hub data set it could not be loaded: {_reason(error)}. "
        f"Without a network, put the data set into a {KINDS} and give data.path=<file>; or download it where there is a network "
        "and copy the cache (HF_HOME) here; or use data=nano."
    )


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or of its cause if the error of `datasets` has no details."""
    if isinstance(error, datasets.exceptions.DatasetGenerationError):
        error = error.__cause__ or error
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _no_rows(path: str) -> UserError:
    return UserError(f"data.path={path!r} has no rows; give a data set with some, or use data=nano.")
