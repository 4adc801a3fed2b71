"""The cost model of speculative decoding (SpecDec++, section 2): seconds from counts.

A round that drafts n tokens takes n draft steps, one verification of n tokens, and some overhead. A rule may add seconds to each
draft step (a head) and to each round (online learning). In a batch, every round costs what its rows and tokens in flight cost.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specheads.errors import UserError, is_count, is_number
from specheads.storage.files import read_json, write_json

PROVENANCE = ("target", "draft", "device", "dtype", "command")  # what a measured table must say of itself
TABLES = ("draft", "target", "alone", "drafting")  # the fields that are tables
LARGEST_SIZE = 2**31 - 1  # of a table's entries
MOST_SECONDS = 1e9  # of a step; sums and products of much more would overflow
POSITIONS = ("target_position", "draft_position", "target_attention")  # the fields that are numbers


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a draft step, of a verification by its number of drafted tokens, and of a round's overhead."""

    draft_seconds: float
    target_seconds: float  # of a verification without a drafted token: one forward pass of the target
    verified_seconds: float = 0.0  # more for each drafted token
    round_seconds: float = 0.0
    # Measured seconds of verifying 0, 1, 2, ... drafted tokens, where there are any; beyond them each token takes
    # `verified_seconds`.
    verification: tuple[float, ...] = ()
    # By step, the mean of its times over their median: near 1 on a quiet machine; empty where costs are counted.
    spread: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def ratio(self) -> float:
        """How many draft steps one forward pass of the target costs."""
        return self.target_seconds / self.draft_seconds if self.draft_seconds else float("inf")

    @classmethod
    def at_ratio(cls, ratio: float, verified_share: float = 0.0) -> "StepCosts":
        """Return costs in units of a target's forward pass, so that a throughput is a speed-up over the target alone.

        `verified_share` is the cost of verifying one more drafted token, as a share of that pass.
        """
        return cls(draft_seconds=1 / ratio, target_seconds=1.0, verified_seconds=verified_share)

    def verify_seconds(self, num_drafted: np.ndarray) -> np.ndarray:
        """Return the seconds of verifying `num_drafted` tokens at once."""
        if not self.verification:
            return self.target_seconds + self.verified_seconds * num_drafted
        last = len(self.verification) - 1
        within = np.asarray(self.verification)[np.minimum(num_drafted, last)]
        return within + self.verified_seconds * np.maximum(num_drafted - last, 0)

    def seconds(self, draft_calls: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """Return the seconds (...) of draft steps (...) and of rounds (..., n + 1), counted by their drafted tokens 0 to n."""
        each = self.round_seconds + self.verify_seconds(np.arange(rounds.shape[-1]))
        return self.draft_seconds * draft_calls + rounds @ each

    def with_rule(self, rule: "RuleCosts") -> "StepCosts":
        """Return the costs with those that a rule adds."""
        return replace(
            self, draft_seconds=self.draft_seconds + rule.step_seconds, round_seconds=self.round_seconds + rule.round_seconds
        )


@dataclass(frozen=True)
class RuleCosts:
    """Seconds that a stopping rule adds: to each draft step, and to each round."""

    step_seconds: float = 0.0
    round_seconds: float = 0.0


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
        last_slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        return np.interp(size, self.sizes, self.seconds) + np.maximum(size - self.sizes[-1], 0) * last_slope


@dataclass(frozen=True)
class LoadCosts:
    """The seconds of a batch's steps.

    Args:
        draft: a draft step, by the tokens that it reads: one per row, more in a round's first step.
        target: a round's step of the target, by the tokens in flight.
        alone: the same where nothing was drafted; None: as `target`.
        drafting: what a round with drafts takes besides its steps, by its rows; None: nothing.
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
    target_position: float = 0.0
    draft_position: float = 0.0
    target_attention: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers; raise UserError for one that is negative or not finite."""
        for name in POSITIONS:
            if not is_number(value := getattr(self, name)) or not 0 <= value <= MOST_SECONDS:
                raise UserError(f"{name}={value} must be seconds from 0 to {MOST_SECONDS:g} for a position of memory.")

    def round_seconds(self, num_requests: int, length: int, positions: int = 0) -> float:
        """Return the seconds of a round that drafts `length` tokens for each request, with so many `positions` in memory."""
        in_flight = num_requests * (1 + length)
        memory = positions * (self.target_position + length * self.draft_position + self.target_attention * (1 + length))
        if not length:
            return float((self.alone or self.target)(in_flight)) + memory
        once = 0.0 if self.drafting is None else float(self.drafting(num_requests))
        return length * float(self.draft(num_requests)) + once + float(self.target(in_flight)) + memory

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
            source = {name: content["provenance"][name] for name in PROVENANCE}
            if not all(isinstance(value, str) for value in source.values()):
                raise UserError(f"provenance must name {', '.join(PROVENANCE)}")
            tables = {
                name: SecondsTable(tuple(content[name]["sizes"]), tuple(content[name]["seconds"]))
                for name in TABLES
                if content.get(name) is not None
            }
            numbers: dict[str, Any] = {name: content.get(name, 0.0) for name in POSITIONS}
            return cls(provenance=content["provenance"], **(numbers | tables))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path} cannot be read as costs ({error}); give a JSON file that LoadCosts.write has written."
            ) from None
