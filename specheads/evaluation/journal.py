"""What a live sweep has measured so far, a line per prompt, so that an interrupted sweep goes on where it was."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specheads.files import write_whole

logger = logging.getLogger(__name__)

Entry = dict[str, Any]


class Journal:
    """A JSON-lines file: first what the sweep is made of, then one entry per finished prompt."""

    def __init__(self, path: Path, made_of: Mapping[str, Any]) -> None:
        """Open `path`, keeping its entries if it is of the same sweep; a line that was cut off is dropped.

        A journal of another sweep (another head, another number of threads) is kept under another name.
        """
        self.path, made_of = path, json.loads(json.dumps(made_of))  # as it will be read back: tuples are lists there
        header, *lines = _lines(path) or [{}]
        found = header.get("made_of") if isinstance(header, dict) else None
        kept = lines if found == made_of else []
        if lines and not kept:
            _set_aside(path, found if isinstance(found, dict) else {}, made_of)
        self.entries: dict[int, Entry] = {line["prompt"]: line["entry"] for line in kept}
        text = "".join(json.dumps(line) + "\n" for line in [{"made_of": made_of}, *kept])
        write_whole(path, lambda temporary: temporary.write_text(text))

    def add(self, prompt: int, entry: Entry) -> None:
        """Record what all settings did with one prompt."""
        self.entries[prompt] = entry
        with self.path.open("a") as stream:
            stream.write(json.dumps({"prompt": prompt, "entry": entry}) + "\n")


def _set_aside(path: Path, found: Mapping[str, Any], made_of: Mapping[str, Any]) -> None:
    """Rename a journal, and say what differs."""
    number = 1
    while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    other = ", ".join(name for name in made_of if found.get(name) != made_of[name])
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
