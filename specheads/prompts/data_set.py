"""A data set by its path: a file, here or on the web, a folder that `save_to_disk` wrote, or a hub
data set; whole, or a split.

Local text files are parsed here: inference of column types would change prompts (a date, a "007"),
and messages name the line.
"""

import csv
import io
import json
import logging
import re
from pathlib import Path

import datasets
from pyarrow import parquet

from specheads.errors import UserError
from specheads.pair.revisions import resolve
from specheads.prompts.data_set_files import KINDS, WEB
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


def load_tables(
    path: str, name: str | None, revision: str | None = None
) -> SourceRows | dict[str, SourceRows]:
    """Return a table, or one per split where the data set has some.

    Raises UserError for what cannot be read, or is empty.
    """
    local = Path(resolve(path))
    try:
        if not local.exists():
            datasets.disable_progress_bars()
            logger.info("data: loading %s, from its address or an earlier download", path)
        if path.startswith(WEB):
            local = Path(datasets.DownloadManager().download(path))
        loaded: datasets.Dataset | datasets.DatasetDict | None = None
        if local.is_dir():
            loaded = datasets.load_from_disk(str(local))
            for rows in loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded]:
                rows.data.validate(full=True)  # reading a damaged offset would end the process
        elif local.is_file() and Path(path).suffix.lower() == ".parquet":
            loaded = datasets.Dataset(datasets.table.InMemoryTable(parquet.read_table(local)))
        elif not local.is_file():
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
        except (ValueError, RecursionError) as error:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):
                number += error.lineno - 1
                reason = f"{error.msg} at column {error.colno}"
            raise _at(path, number, f"no JSON ({reason}); {expected}") from None
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


def _not_loaded(path: str, name: str | None, is_local: bool, error: Exception) -> UserError:
    cause = error
    if isinstance(error, datasets.exceptions.DatasetGenerationError):
        cause = error.__cause__ or error
    reason = (str(cause).splitlines() or [type(cause).__name__])[0].rstrip(".")
    if is_local:
        return UserError(f"data.path={path!r} cannot be read ({reason}); write it again.")
    return UserError(
        f"data.path={path!r} with data.name={name} is no local file or folder, and could not be"
        f" loaded: {reason}. Without a network, copy a {KINDS} here and give data.path=<file>, or"
        " copy the cache (HF_HOME) of a machine that has it."
    )
