"""What a batch costs: the seconds of its steps by their tokens, and by the memory that they read."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specheads.errors import UserError, is_count, is_number
from specheads.storage.files import read_json, write_json

PROVENANCE = ("target", "draft", "device", "dtype", "command")  # what a measured table must say of itself
TABLES = ("draft", "target", "alone", "drafting", "admission", "prompts")  # the fields that are tables
LARGEST_SIZE = 2**31 - 1  # of a table's entries
MOST_SECONDS = 1e9  # of a step; sums and products of much more would overflow
SecondsBySize = Callable[[Any], Any]  # of numbers or arrays of them
POSITIONS = ("target_position", "draft_position", "target_attention")  # the fields that are numbers


@dataclass(frozen=True)
class SecondsTable:
    """Seconds by size: linear between its entries and beyond the last, constant below the first.

    Raises:
        UserError: fewer than two entries, sizes that do not rise, seconds that are not positive or that fall at the end.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the entries."""
        if len(self.sizes) < 2 or len(self.sizes) != len(self.seconds):
            raise UserError(f"a table with sizes={self.sizes} and seconds={self.seconds} needs two entries or more of each.")
        if not all(is_count(size, least=1) and size <= LARGEST_SIZE for size in self.sizes) or (np.diff(self.sizes) <= 0).any():
            raise UserError(f"sizes={self.sizes} must be positive integers of at most {LARGEST_SIZE} in rising order.")
        if not all(is_number(value) and 0 < value <= MOST_SECONDS for value in self.seconds):
            raise UserError(f"seconds={self.seconds} must be positive numbers of at most {MOST_SECONDS:g}.")
        if self.seconds[-1] < self.seconds[-2]:
            raise UserError(
                f"seconds={self.seconds} must not fall at the end, because they are continued beyond it; measure again."
            )

    def __call__(self, size: Any) -> Any:
        """Return the seconds (...) at sizes (...)."""
        beyond = np.maximum(size - self.sizes[-1], 0)
        return np.interp(size, self.sizes, self.seconds) + beyond * self.last_slope

    @cached_property
    def last_slope(self) -> float:
        """Seconds per unit of size beyond the last entry."""
        return (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])

    def envelope(self) -> "SecondsTable":
        """Return the lower convex envelope: the largest convex function that is nowhere above this one.

        Padded or captured sizes make costs a staircase, on which a scheduler that stops where costs rise would stop at every
        edge.
        """
        hull: list[tuple[int, float]] = []
        for point in zip(self.sizes, self.seconds, strict=True):
            while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(point)
        # The last slope goes on for ever, so that the envelope can rise no faster before it.
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= self.last_slope:
            hull.pop()
        size, seconds = hull[-1]
        hull.append((size + 1, seconds + self.last_slope))
        sizes, values = zip(*hull, strict=True)
        return SecondsTable(sizes, values)

    @cached_property
    def flat_until(self) -> int:
        """The largest size of an entry up to which nothing costs more than the smallest size."""
        within = [size for size, value in zip(self.sizes, self.seconds, strict=True) if value <= self.seconds[0] * (1 + 1e-9)]
        return within[-1]


def _slope(first: tuple[int, float], second: tuple[int, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


@dataclass(frozen=True)
class LoadCosts:
    """The seconds of a batch's steps.

    Args:
        draft: a draft step, by the tokens that it reads: one per row, more in a round's first step.
        target: a round's step of the target, by the tokens in flight.
        alone: the same where nothing was drafted; None: as `target`.
        drafting: what a round with drafts takes besides its steps, by its rows; None: nothing.
        admission: what predicting and weighing its tokens takes more, by its rows; None: nothing.
        prompts: the target's reading of prompts by their tokens, in steps of their own; None: the round's step reads them.
        target_position, draft_position: what a step of each model takes more for a position of memory, of all its rows together.
        target_attention: what the target's step takes more for a position that one of its tokens attends to, where attending
            takes longer than reading.
        provenance: where the numbers come from.
    """

    draft: SecondsTable
    target: SecondsTable
    provenance: Mapping[str, str] = field(default_factory=dict)
    alone: SecondsTable | None = None
    drafting: SecondsTable | None = None
    admission: SecondsTable | None = None
    prompts: SecondsTable | None = None
    target_position: float = 0.0
    draft_position: float = 0.0
    target_attention: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers; raise UserError for one that is negative or not finite."""
        for name in POSITIONS:
            if not is_number(value := getattr(self, name)) or not 0 <= value <= MOST_SECONDS:
                raise UserError(f"{name}={value} must be seconds from 0 to {MOST_SECONDS:g} for a position of memory.")

    @cached_property
    def envelope(self) -> SecondsTable:
        """The lower convex envelope of the target's seconds, which decisions are made on."""
        return self.target.envelope()

    def round_seconds(self, requests: int, depth: int, in_flight: Any, positions: int = 0) -> Any:
        """Return the seconds (...) of a round that drafts `depth` tokens for each request, by its tokens in flight (...).

        They are those that decisions are made on: on the envelope, with one token per request in each draft step, and as if all
        requests had as much of the `positions` in memory.
        """
        memory = positions * (self.target_position + depth * self.draft_position + self.target_attention * in_flight / requests)
        if not depth:
            return (self.alone or self.envelope)(in_flight) + memory
        return depth * self.draft(requests) + self.besides(requests) + self.envelope(in_flight) + memory

    def verification(self, positions: float) -> SecondsBySize:
        """Return the envelope of the target's seconds by its tokens, each of which attends to so many positions."""
        table, token = self.envelope, self.target_attention * positions
        return lambda size: table(size) + token * size

    def besides(self, requests: int) -> float:
        """Return what a round with drafts takes besides its steps."""
        return 0.0 if self.drafting is None else float(self.drafting(requests))

    def weighing(self, requests: int) -> float:
        """Return what predicting and weighing the tokens of a round takes."""
        return 0.0 if self.admission is None else float(self.admission(requests))

    def write(self, path: Path) -> None:
        """Write the tables as JSON."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "LoadCosts":
        """Read measured tables.

        Raises:
            UserError: no such file, something else in it, a table without its provenance.
        """
        try:
            content = read_json(path)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read as costs ({error}); give a JSON file that LoadCosts.write has written."
            ) from None
        if not isinstance(content, Mapping) or not {"draft", "target", "provenance"} <= content.keys():
            raise UserError(f"{path} must have draft, target and provenance; give a JSON file that LoadCosts.write has written.")
        provenance = content["provenance"] if isinstance(content["provenance"], Mapping) else {}
        if missing := [name for name in PROVENANCE if not isinstance(provenance.get(name), str)]:
            raise UserError(f"{path} does not say its {missing[0]}; provenance must name {', '.join(PROVENANCE)}.")
        tables = {name: _table(content[name], f"{path}: {name}") for name in TABLES if content.get(name) is not None}
        numbers: dict[str, Any] = {name: content.get(name, 0.0) for name in POSITIONS}
        try:
            return cls(provenance=provenance, **(numbers | tables))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def _table(content: Any, where: str) -> SecondsTable:
    lists = [content.get(name) for name in ("sizes", "seconds")] if isinstance(content, Mapping) else [None]
    if not all(isinstance(values, list) and all(map(is_number, values)) for values in lists):
        raise UserError(f"{where} must have sizes and seconds, two lists of numbers of the same length.")
    try:
        return SecondsTable(tuple(content["sizes"]), tuple(map(float, content["seconds"])))
    except (UserError, OverflowError) as error:
        raise UserError(f"{where}: {error}") from None
