"""Everything that a command wrote, as values by name, so that folders of two runs can be compared in one way for all commands.

Dates in names and texts are replaced by their order, and the folder itself by a dot. A text file is its lines, JSON its values;
tensors and Parquet are their bytes; seconds and the machine's load are a sign in their place. Checkpoints, locks, logs, copies
that can be made again, and notes of whether a run was resumed are left out.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DATE = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(-\d+)?")
LEFT_OUT = re.compile(r"\.lock$|\.log$|\.ckpt$|/run\.json$|/\.arrow/|/\.hydra/|/wandb/")
SECONDS = re.compile(r"\d+(\.\d+)? s\b|(?<=^  start: )[\d.]+|(?<=^  end: )[\d.]+")  # in texts; those of a load are lines
TEXTS = (".csv", ".yaml", ".md", ".txt", ".html")

Values = dict[str, Any]


def values_of(folder: Path, parts: tuple[str, ...] = ("data", "outputs")) -> Values:
    """Return all values in some parts of a folder by their names: the file, and the place in it."""
    files = sorted(path for part in parts for path in (folder / part).rglob("*") if path.is_file())
    files = [path for path in files if not LEFT_OUT.search(str(path))]
    dates = _dates(files)
    return {
        _plain(f"{path.relative_to(folder)} {place}", folder, dates): _plain(value, folder, dates)
        for path in files
        for place, value in _values(path)
    }


def _dates(files: list[Path]) -> Mapping[str, str]:
    dates = {match[0] for path in files for match in DATE.finditer(str(path))}
    return {date: f"<run {number}>" for number, date in enumerate(sorted(dates))}


def _plain(value: Any, folder: Path, dates: Mapping[str, str]) -> Any:
    if not isinstance(value, str):
        return value
    return SECONDS.sub("<time>", DATE.sub(lambda match: dates.get(match[0], "<a date>"), value.replace(str(folder), ".")))


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the places in a file with their values."""
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        for number, line in enumerate(lines):
            yield from _flat(json.loads(line), str(number))
    elif path.suffix in TEXTS:
        yield from ((str(number), line) for number, line in enumerate(content.decode().splitlines()))
    else:
        yield "", hashlib.sha256(content).hexdigest()


def _flat(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(each, f"{place}.{key}")
    else:
        is_time = isinstance(value, float) and (place.endswith("seconds") or ".load." in place)
        yield place, "<time>" if is_time else repr(value) if isinstance(value, float | dict | list) else value


def repeatable(first: Values, second: Values) -> set[str]:
    """Return the names of the values that two undisturbed runs share: what differs between them depends on time."""
    return {name for name in first.keys() & second.keys() if first[name] == second[name]}


def differences(values: Values, whole: Values, compared: set[str]) -> list[str]:
    """Return which of the compared values of an undisturbed run another has not, and files that it should not have."""
    files = {name.partition(" ")[0] for name in whole}
    extra = {file for name in values if (file := name.partition(" ")[0]) not in files}
    return sorted(
        [name for name in compared if values.get(name) != whole[name]] + [f"{file} should not be there" for file in extra]
    )
