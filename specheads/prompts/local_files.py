"""Local JSON, CSV and text files as rows.

They are parsed here, because inference of column types would change prompts (a date, a "007" and an "NA" are text in a prompt)
and because a message can then name the line.
"""

import csv
import io
import json
from pathlib import Path

from specheads.errors import UserError
from specheads.prompts.table import Table, kind_of

EXAMPLE = '{"instruction": "..."}'


def read_file(path: str, file: Path) -> Table:
    """Return the rows of a .json, .jsonl, .csv or .txt file; `path` is its name in messages, and has the suffix.

    Raises:
        UserError: text that is not UTF-8, or not in the format of the suffix; the message names the line.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # with or without the mark that Windows puts first
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _at(path, line, f"not UTF-8 ({error.reason}); save the file as UTF-8") from None
    return {".csv": _parse_csv, ".txt": _parse_text}.get(Path(path).suffix.lower(), _parse_json)(path, text)


def _parse_text(path: str, text: str) -> Table:
    return Table([{"text": line} for line in text.removesuffix("\n").split("\n")], row_name="line")


def _parse_csv(path: str, text: str) -> Table:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    rows: list[dict] = []
    try:
        for row in reader:
            if None in row:  # where csv puts what is beyond the header
                expected = len(reader.fieldnames or ())
                cells = expected + len(row[None])
                raise _at(
                    path, reader.line_num, f"{cells} cells under a header of {expected}; put quotes around texts with commas"
                )
            rows.append(row)
    except csv.Error as error:
        raise _at(path, reader.line_num + 1, f"no CSV ({error}); check its quotes") from None
    return Table(rows)


def _parse_json(path: str, text: str) -> Table:
    """Parse an array of objects, or one object per line; a blank line is an empty row, so that rows count as lines do."""
    if text.lstrip().startswith("["):
        return _parse_json_array(path, text)
    rows = []
    for number, line in enumerate(text.rstrip().split("\n"), 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            if number == 1 and _is_json(text):
                raise UserError(
                    f"data.path={path!r} holds one JSON value over several lines; expected an array of objects, or one object "
                    f"per line, such as {EXAMPLE}."
                ) from None
            raise _at(
                path, number, f"no JSON ({error.msg} at column {error.colno}); expected one object per line, such as {EXAMPLE}"
            ) from None
        if not isinstance(row, dict):
            raise _at(path, number, f"{kind_of(row)} instead of an object; expected one per line, such as {EXAMPLE}")
        rows.append(row)
    return Table(rows if any(rows) else [], row_name="line")


def _parse_json_array(path: str, text: str) -> Table:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise _at(
            path, error.lineno, f"no JSON ({error.msg} at column {error.colno}); expected an array of objects such as [{EXAMPLE}]"
        ) from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(
                f"data.path={path!r}, row {number}: {kind_of(row)} instead of an object; expected an array such as [{EXAMPLE}]."
            )
    return Table(rows)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _at(path: str, line: int, problem: str) -> UserError:
    return UserError(f"data.path={path!r}, line {line}: {problem}.")
