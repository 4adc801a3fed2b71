"""Mutations of the files of one kind, and what its readers said."""

import random
import shutil
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specheads.errors import user_error
from tests.mutations.kinds import Kind
from tests.mutations.mutate import mutated


@dataclass
class Outcomes:
    """How often mutated files were read as before, as another valid file, or refused.

    And what went wrong.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def tried(kind: Kind, folder: Path, count: int, seed: int = 0) -> Outcomes:
    """Mutate `count` files of a kind in `folder`, one at a time, and read after each mutation."""
    made = folder / "made"
    trial = folder / "trial"
    made.mkdir(parents=True)
    kind.make(made)
    contents = {
        path.relative_to(made): path.read_bytes()
        for path in sorted(made.rglob("*"))
        if path.is_file()
    }
    before = _fresh(trial, contents) or kind.read(trial)
    names = sorted(_matching(made, kind.files))
    checked = _matching(made, kind.checked)
    rng = random.Random(seed)
    outcomes = Outcomes()
    for number in range(count):
        name = names[number % len(names)]
        mutation, content = mutated(
            rng, contents[name], [contents[other] for other in names if other != name]
        )
        _fresh(trial, contents | {name: content})
        result = _read(kind, trial, before, name in checked)
        outcomes.counts[result.partition(":")[0]] += 1
        if result.startswith("failed"):
            outcomes.failures.append(f"{name}, number {number} ({mutation}): {result}")
    return outcomes


def _matching(folder: Path, patterns: Sequence[str]) -> set[Path]:
    """Return the files that match a pattern, relative to the folder."""
    return {
        path.relative_to(folder)
        for pattern in patterns
        for path in folder.glob(pattern)
        if path.is_file()
    }


def _fresh(folder: Path, contents: Mapping[Path, bytes | None]) -> None:
    """Write files into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)


def _read(kind: Kind, folder: Path, before: Any, checked: bool) -> str:
    try:
        after = kind.read(folder)
    except Exception as error:  # noqa: BLE001  # which is what this is about
        message = str(error)
        if isinstance(error, kind.refusals) and message and not isinstance(error, UnicodeError):
            return "refused"
        said = user_error(error)
        if said is not None and "out of memory" not in str(said):
            return "refused"
        return "failed: " + "".join(traceback.format_exception(error, limit=-4))
    if after == before:
        return "as before"
    return f"failed: read in silence as {after!r:.500}" if checked else "another value"

