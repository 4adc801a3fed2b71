"""A data set by its path: a file, here or on the web, a folder that `save_to_disk` wrote, or a hub
data set; whole, or a split.

Local text files are parsed here: inference of column types would change prompts (a date, a "007"),
and messages name the line.
"""

import contextlib
import csv
import io
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import datasets
from pyarrow import parquet

from specheads.errors import UserError
from specheads.pair.revisions import resolve
from specheads.prompts.templates import SourceRows, kind_of

logger = logging.getLogger(__name__)

# What `datasets` raises for a data set that is missing, damaged or something else; all of these
# happen.
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    RuntimeError,
    TypeError,
    AttributeError,
    datasets.exceptions.DatasetsError,
)
_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt")
_KINDS = "JSON, JSONL, CSV, Parquet or text file"
_WEB = ("https://", "http://")


def check(path: str, splits: Mapping[str, str]) -> None:
    """Raise UserError for a local path that holds nothing to read, and for splits, by key, that are
    not like "train[:500]".
    """
    for key, split in splits.items():
        try:
            datasets.ReadInstruction.from_spec(split)
        except ValueError:
            example = f"for example {key}=train or '{key}=\"train[:500]\"'"
            raise UserError(
                f"{key}={split!r} must be the name of a split or a slice of one, {example}."
            ) from None
    what = f"data.path={path!r}"
    if not path:
        raise UserError(f"{what} must be a path; give a {_KINDS}, a folder, or a hub data set.")
    local = Path(resolve(path))
    try:
        if local.is_dir():
            if not any((local / name).is_file() for name in ("dataset_dict.json", "state.json")):
                raise UserError(
                    f"{what} is a folder, but no data set that save_to_disk wrote; give such a"
                    f" folder, or a single {_KINDS}."
                )
        elif local.exists() or path.startswith(_WEB):
            if local.suffix.lower() not in _SUFFIXES:
                raise UserError(
                    f"{what} ends in {local.suffix or 'no suffix'}, but only {', '.join(_SUFFIXES)}"
                    " are read; convert it to one of them, or rename it."
                )
            if local.exists():
                local.open("rb").close()
        elif local.suffix.lower() in _SUFFIXES or path.startswith(("/", "./", "../", "~")):
            raise UserError(
                f"{what}: there is no {local.absolute()}; give a {_KINDS}, a folder written by"
                " save_to_disk, or a hub data set."
            )
    except OSError as error:
        raise UserError(
            f"{what} cannot be read ({error.strerror}); check the path and who may read it."
        ) from None


def load_tables(
    path: str, name: str | None, revision: str | None = None
) -> SourceRows | dict[str, SourceRows]:
    """Return a table, or one per split where the data set has some.

    Raises UserError for what cannot be read, or is empty.
    """
    local = Path(resolve(path))
    try:
        with _quiet():
            if path.startswith(_WEB):
                logger.info(
                    "data: loading %s, from the web or from the cache of an earlier download", path
                )
                local = Path(datasets.DownloadManager().download(path))
            loaded: datasets.Dataset | datasets.DatasetDict | None = None
            if local.is_dir():
                loaded = datasets.load_from_disk(str(local))
                for rows in (
                    loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded]
                ):
                    rows.data.validate(full=True)  # reading a damaged offset would end the process
            elif local.is_file() and Path(path).suffix.lower() == ".parquet":
                loaded = datasets.Dataset(datasets.table.InMemoryTable(parquet.read_table(local)))
            elif not local.is_file():
                logger.info(
                    "data: loading %s, from the hub or from the cache of an earlier download", path
                )
                loaded = datasets.load_dataset(
                    path, name, **({"revision": revision} if revision else {})
                )
    except _UNREADABLE as error:
        raise _not_loaded(path, name, local.exists(), error) from error
    if isinstance(loaded, datasets.Dataset):
        return SourceRows(loaded)
    if loaded is not None:
        return {key: SourceRows(rows) for key, rows in loaded.items()}
    table = _read_file(path, local)
    if not any(table.rows):
        raise UserError(
            f"data.path={path!r} has no rows; give a data set with some, or use data=nano."
        )
    return table


def _read_file(path: str, file: Path) -> SourceRows:
    """Return the rows of a .json, .jsonl, .csv or .txt file.

    `path` is its name in messages, and has the suffix.
    """
    try:
        # With or without the mark that Windows puts first.
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _at(path, line, f"not UTF-8 ({error.reason}); save the file as UTF-8") from None
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        return _parse_csv(path, text)
    if suffix == ".txt":
        return SourceRows(
            [{"text": line} for line in text.removesuffix("\n").split("\n")], row_name="line"
        )
    return _parse_json(path, text)


def _parse_csv(path: str, text: str) -> SourceRows:
    csv.field_size_limit(2**31 - 1)  # a long text is no mistake
    reader = csv.DictReader(io.StringIO(text), strict=True)
    rows: list[dict] = []
    try:
        names = [name for name in reader.fieldnames or () if name]
        if twice := [name for name in names if names.count(name) > 1]:
            raise _at(path, 1, f"two columns are named {twice[0]!r}; rename one of them")
        for row in reader:
            if None in row:  # csv puts there what is beyond the header
                expected = len(reader.fieldnames or ())
                cells = f"{expected + len(row[None])} cells under a header of {expected}"
                raise _at(path, reader.line_num, f"{cells}; put quotes around texts with commas")
            rows.append(row)
    except csv.Error as error:
        raise _at(path, reader.line_num + 1, f"no CSV ({error}); check its quotes") from None
    return SourceRows(rows)


def _parse_json(path: str, text: str) -> SourceRows:
    """Parse an array of objects, or one object per line.

    A blank line is an empty row, so that rows count as lines do.
    """
    is_array = text.lstrip().startswith("[")
    expected = (
        'expected one object per line, or an array of objects, such as {"instruction": "..."}'
    )
    rows: list[dict] = []
    for number, part in enumerate([text] if is_array else text.rstrip().split("\n"), 1):
        try:
            value = json.loads(part) if part.strip() else {}
        except json.JSONDecodeError as error:
            place = number + error.lineno - 1
            raise _at(
                path, place, f"no JSON ({error.msg} at column {error.colno}); {expected}"
            ) from None
        except (
            ValueError,
            RecursionError,
        ) as error:  # an integer of thousands of digits, thousands of brackets
            raise _at(
                path, number, f"JSON that cannot be read ({error}); shorten it or leave it out"
            ) from None
        for row in value if is_array else [value]:
            if not isinstance(row, dict):
                raise _at(
                    path,
                    len(rows) + 1,
                    f"{kind_of(row)} instead of an object; {expected}",
                    "row" if is_array else "line",
                )
            rows.append(row)
    return SourceRows(rows, row_name="row" if is_array else "line")


def _at(path: str, number: int, problem: str, row_name: str = "line") -> UserError:
    return UserError(f"data.path={path!r}, {row_name} {number}: {problem}.")


def cut(
    tables: SourceRows | dict[str, SourceRows], path: str, key: str, split: str
) -> list[SourceRows]:
    """Return the tables that a split such as "train[:500]+test" names, without splits any.

    Raises UserError if it is empty.
    """
    if isinstance(tables, SourceRows):
        tables = {re.split(r"[\[+(]", split)[0].strip(): tables}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(
            {name: len(table.rows) for name, table in tables.items()}
        )
    except ValueError as error:
        raise UserError(
            f"{key}={split!r} cannot be taken from {path}: {str(error).rstrip('.')}."
        ) from None
    pieces = list[SourceRows]()
    for part in parts:
        if part.from_ < part.to:
            pieces.append(tables[part.splitname].part(part.from_, part.to))
    if not pieces:
        raise UserError(
            f"{key}={split!r} holds no rows of {path}; widen it, or give a data set with more."
        )
    return pieces


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars and log messages of `datasets` and its hub client: our messages
    contain the important parts.
    """
    with contextlib.ExitStack() as afterwards:
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            afterwards.callback(datasets.enable_progress_bars)
        for library in map(logging.getLogger, ("datasets", "huggingface_hub")):
            afterwards.callback(library.setLevel, library.level)
            library.setLevel(logging.CRITICAL)
        yield


def _not_loaded(path: str, name: str | None, is_local: bool, error: Exception) -> UserError:
    cause = (
        (error.__cause__ or error)
        if isinstance(error, datasets.exceptions.DatasetGenerationError)
        else error
    )
    reason = (str(cause).splitlines() or [type(cause).__name__])[0].rstrip(".")
    what = f"data.path={path!r}"
    if is_local:
        return UserError(f"{what} cannot be read ({reason}); write it again.")
    if isinstance(error, ValueError):  # it exists, but not with these arguments
        return UserError(
            f"{what} with data.name={name} could not be loaded: {reason}. Give the data.name of a"
            " configuration that it has, or data.name=null."
        )
    if path.startswith(_WEB):
        return UserError(
            f"{what} could not be loaded: {reason}. Check the address; without a network, copy the"
            " file here and give data.path=<file>."
        )
    return UserError(
        f"{what} is no local file or folder, and as a hub data set it could not be loaded:"
        f" {reason}. Without a network, put the data set into a {_KINDS} and give data.path=<file>;"
        " or download it where there is a network and copy the cache (HF_HOME) here; or use"
        " data=nano."
    )
