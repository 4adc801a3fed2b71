"""What a live sweep has measured so far, a line per prompt, so that an interrupted sweep goes on where it was."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specheads.storage.files import write_whole

logger = logging.getLogger(__name__)

Entry = dict[str, Any]


class Journal:
    """A JSON-lines file: first what the sweep is made of, then one entry per finished prompt."""

    def __init__(self, path: Path, provenance: Mapping[str, Any]) -> None:
        """Open `path`, keeping its entries if it is of the same sweep; a line that was cut off is dropped.

        A journal of another sweep (another head, another number of threads) is kept under another name.
        """
        self.path, provenance = path, json.loads(json.dumps(provenance))  # as it will be read back: tuples are lists there
        header, *lines = _lines(path) or [{}]
        found = header.get("provenance") if isinstance(header, dict) else None
        kept = lines if found == provenance else []
        if lines and not kept:
            _set_aside(path, found if isinstance(found, dict) else {}, provenance)
        self.entries: dict[int, Entry] = {line["prompt"]: line["entry"] for line in kept}
        text = "".join(json.dumps(line) + "\n" for line in [{"provenance": provenance}, *kept])
        write_whole(path, lambda temporary: temporary.write_text(text))

    def add(self, prompt: int, entry: Entry) -> None:
        """Record what all settings did with one prompt."""
        self.entries[prompt] = entry
        with self.path.open("a") as stream:
            stream.write(json.dumps({"prompt": prompt, "entry": entry}) + "\n")


def _set_aside(path: Path, found: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Rename a journal, and say what differs."""
    number = 1
    while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    other = ", ".join(name for name in provenance if found.get(name) != provenance[name])
    logger.warning("starts anew: %s was measured with another %s; it is kept as %s", path, other, aside.name)


def _lines(path: Path) -> list[Entry]:
    """Return the whole lines of a file, none where it is not there or not a journal."""
    found: list[Entry] = []
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return found
