"""Lengths of drafts in a batch, chosen before each round by the load: every round costs what its tokens in flight cost."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specheads.decoding.arguments import check_count
from specheads.errors import UserError, is_count, is_number
from specheads.storage.files import read_json, write_json

MAX_TOKENS = 8  # usual longest draft; a batch drafts in lockstep, so deeper drafts rarely pay
PROVENANCE = ("target", "draft", "device", "dtype", "command")  # what a measured table must say of itself
TABLES = ("draft", "target", "alone", "drafting")  # the fields that are tables
LARGEST_SIZE = 2**31 - 1  # of a table's entries
MOST_SECONDS = 1e9  # of a step; sums and products of much more would overflow
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


class LengthPolicy:
    """Decides before each round of a batch how many tokens every row drafts, in place of the decoder's stopping rule.

    No token has an influence on lengths, so the output of every row follows the target's distribution. `specheads evaluate`
    calls a class of conf/stopping with `costs` and `survival`, see LoadAware, and with the keys of its file.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        check_count("max_tokens", max_tokens)
        self.max_tokens = max_tokens

    def length(self, num_requests: int, positions: int) -> int:
        """Return how many tokens each of the `num_requests` rows drafts, up to `max_tokens`; 0: the target decodes alone.

        Args:
            num_requests: rows of the round.
            positions: of all rows in memory.
        """
        raise NotImplementedError


class LoadAware(LengthPolicy):
    """Draft the length with the highest expected throughput, with what a round costs at this number of rows.

    Source: goodput in SmartSpec (Liu et al. 2024), with acceptance measured on other prompts in place of earlier rounds. What a
    draft has to read once it drafts again, after rounds of the target alone, is left out.

    Args:
        costs: seconds of rounds.
        survival: the probability that the first 1, 2, ... tokens of a draft are all accepted.
        max_tokens: longest draft.
    """

    POSITION_STEP = 1.25  # positions in memory count in steps of a quarter, so that equal rounds are planned once

    def __init__(self, costs: LoadCosts, survival: Sequence[float], max_tokens: int = MAX_TOKENS) -> None:
        check_count("max_tokens", max_tokens, least=1)
        if not len(survival) or not all(is_number(value) and 0 <= value <= 1 for value in survival):
            raise UserError(f"survival={list(survival)} must be probabilities, one for each length of a draft.")
        super().__init__(min(max_tokens, len(survival)))
        emitted = 1 + np.concatenate([[0.0], np.cumsum(survival[: self.max_tokens])])

        @cache
        def best(num_requests: int, power: int) -> int:
            positions = int(self.POSITION_STEP**power)
            seconds = [costs.round_seconds(num_requests, length, positions) for length in range(len(emitted))]
            return int(np.argmax(emitted / seconds))

        self._best = best

    def length(self, num_requests: int, positions: int) -> int:
        return self._best(num_requests, round(float(np.log(max(positions, 1)) / np.log(self.POSITION_STEP))))
