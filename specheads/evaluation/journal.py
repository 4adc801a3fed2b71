"""What a live sweep has measured so far, a line per prompt, so that an interrupted sweep goes on where it was."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specheads.files import write_whole

Entry = dict[str, Any]


class Journal:
    """A JSON-lines file: first what the sweep is made of, then one entry per finished prompt."""

    def __init__(self, path: Path, made_of: Mapping[str, Any]) -> None:
        """Open `path`, keeping its entries if it is of the same sweep; a line that was cut off is dropped."""
        self.path = path
        header, *lines = _lines(path) or [{}]
        kept = lines if header == {"made_of": made_of} else []
        self.entries: dict[int, Entry] = {line["prompt"]: line["entry"] for line in kept}
        text = "".join(json.dumps(line) + "\n" for line in [{"made_of": made_of}, *kept])
        write_whole(path, lambda temporary: temporary.write_text(text))

    def add(self, prompt: int, entry: Entry) -> None:
        """Record what all settings did with one prompt."""
        self.entries[prompt] = entry
        with self.path.open("a") as stream:
            stream.write(json.dumps({"prompt": prompt, "entry": entry}) + "\n")


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
