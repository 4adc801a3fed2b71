"""Lengths of drafts in a batch, chosen before each round by the load: every round costs what its tokens in flight cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from specheads.errors import UserError, is_number
from specheads.settings import Count, PositiveCount, check

MAX_TOKENS = 8  # usual longest draft; a batch drafts in lockstep, so deeper drafts rarely pay


@dataclass(frozen=True)
class LoadCosts:
    """The seconds of a batch's rounds.

    Args:
        rows: the numbers of rows that are known, ascending; seconds are linear between them and constant outside.
        rounds: for each of them, the seconds of rounds with 0, 1, 2, ... drafted tokens in each row, on an empty memory; with
            more, they are those of the last.
        position: what a round takes more for each position in memory, of all rows, and each forward pass.
    """

    rows: Sequence[int]
    rounds: Sequence[Sequence[float]]
    position: float = 0.0

    def round_seconds(self, num_requests: int, length: int, positions: int = 0) -> float:
        """Return the seconds of a round that drafts `length` tokens for each request, with so many `positions` in memory."""
        empty = np.interp(num_requests, self.rows, [seconds[min(length, len(seconds) - 1)] for seconds in self.rounds])
        return float(empty) + positions * (1 + length) * self.position


class LengthPolicy:
    """Decides before each round of a batch how many tokens every row drafts, in place of the decoder's stopping rule.

    No token has an influence on lengths, so the output of every row follows the target's distribution.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        check("max_tokens", max_tokens, Count)
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

    Args:
        costs: seconds of rounds.
        survival: the probability that the first 1, 2, ... tokens of a draft are all accepted, as measured on other prompts.
        max_tokens: longest draft.

    Source: goodput in SmartSpec (Liu et al. 2024).
    """

    POSITION_STEP = 1.25  # positions in memory count in steps of a quarter, so that equal rounds are planned once

    def __init__(self, costs: LoadCosts, survival: Sequence[float], max_tokens: int = MAX_TOKENS) -> None:
        check("max_tokens", max_tokens, PositiveCount)
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
