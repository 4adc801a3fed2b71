"""The measurements of a live sweep, a line per prompt with its checksum, so that an interrupted
sweep can resume.
"""

import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specheads.storage.files import write_whole

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
_KEYS = {"prompt", "entry", "crc32"}


class Journal:
    """A JSON-lines file: first the provenance of the sweep, then one entry per finished prompt,
    which is measured once only.
    """

    def __init__(self, path: Path, provenance: Mapping[str, object]) -> None:
        """Open `path` and keep its entries if its provenance is the same.

        Incomplete and damaged lines are dropped.
        """
        self.path = path
        header = json.loads(json.dumps({"provenance": provenance}))  # tuples become lists
        earlier, *lines = _lines(path) or [{}]
        kept = [line for line in lines if _is_entry(line)] if earlier == header else []
        if len(kept) < len(lines):
            logger.warning(
                "%s: %d lines of other settings, or damaged ones, are measured again",
                path,
                len(lines) - len(kept),
            )
        self.entries: dict[int | str, Entry] = {line["prompt"]: line["entry"] for line in kept}
        text = "".join(json.dumps(line) + "\n" for line in [header, *kept])
        write_whole(path, lambda temporary: temporary.write_text(text))

    def add(self, prompt: int | str, entry: Entry) -> None:
        self.entries[prompt] = entry
        with self.path.open("a") as stream:
            stream.write(
                json.dumps({"prompt": prompt, "entry": entry, "crc32": _checksum(prompt, entry)})
                + "\n"
            )


def _checksum(prompt: int | str, entry: Entry) -> int:
    return zlib.crc32(json.dumps([prompt, entry], sort_keys=True).encode())


def _is_entry(line: object) -> bool:
    return (
        isinstance(line, dict)
        and line.keys() == _KEYS
        and line["crc32"] == _checksum(line["prompt"], line["entry"])
    )


def _lines(path: Path) -> list[Entry]:
    """Return the lines of a file, empty ones for those that are not JSON, none if it does not
    exist.
    """
    lines: list[Entry] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                lines.append(json.loads(line))
            except (ValueError, RecursionError):
                lines.append({})  # incomplete or damaged
    return lines
