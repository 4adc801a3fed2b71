"""What of a data set's keys is checked before it is read, without `datasets`, which takes seconds
to import.
"""

import re
from pathlib import Path

from specheads.errors import UserError
from specheads.pair.locations import unabbreviated

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt")
KINDS = "JSON, JSONL, CSV, Parquet or text file"
WEB = ("https://", "http://")
# As datasets.ReadInstruction has it: train, train[:500], train[10%:](pct1_dropremainder)
_BOUND = r"-?(?:[\d_]+|(?:100|\d?\d)%)"
_SPLIT = re.compile(rf"\w+(\.\w+)*(\[(?:{_BOUND})?:(?:{_BOUND})?\])?(\([^)]*\))?")


def check_split(key: str, split: str) -> None:
    """Raise UserError for a split that is not like "train[:500]"."""
    if not all(map(_SPLIT.fullmatch, re.split(r"\s*\+\s*", split))):
        raise UserError(
            f"{key}={split!r} must be the name of a split or a slice of one, for example"
            f" {key}=train or '{key}=\"train[:500]\"'."
        )


def check_path(path: str) -> None:
    """Raise UserError for a local path that holds nothing to read."""
    local = Path(unabbreviated(path))
    suffix = local.suffix.lower()
    is_file = local.is_file() or path.startswith(WEB)
    wrong = ""
    if local.is_dir():
        if not any((local / name).is_file() for name in ("dataset_dict.json", "state.json")):
            wrong = "is a folder, but no data set that save_to_disk wrote"
    elif is_file and suffix not in SUFFIXES:
        wrong = f"ends in {suffix}, but only {', '.join(SUFFIXES)} are read"
    elif not is_file and (suffix in SUFFIXES or path.startswith(("/", "./", "../", "~"))):
        wrong = f"is not there ({local.absolute()})"
    if wrong:
        raise UserError(
            f"data.path={path!r} {wrong}; give a {KINDS}, a folder of save_to_disk, or a hub data"
            " set."
        )
