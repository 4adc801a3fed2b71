"""How many drafted tokens a stopping rule expected to be accepted: with what was accepted it shows whether predictions hold."""

from dataclasses import dataclass
from typing import Any

from specheads.decoding.stopping import StoppingRule
from specheads.decoding.verification import TokenVerification, Verification

LARGEST_DRIFT = 0.1  # between accepted tokens and those that a rule expected, beyond which it is worth fitting again
REMEDY = "specheads evaluate head=<folder> calibrate=true, with the same model, data and warp, fits it to such prompts"


@dataclass
class Drift:
    """Accepted tokens and those that a head expected, over the rounds of many requests; counted again after every report."""

    every: int = 2000  # rounds of a report; the ratio of fewer is uncertain by more than it may differ from 1
    rounds: int = 0
    accepted: int = 0
    expected: float = 0.0

    def add(self, accepted: int, expected: float) -> tuple[str, bool] | None:
        """Take in a round; return a report once there were enough, and whether predictions do not hold."""
        self.rounds, self.accepted, self.expected = self.rounds + 1, self.accepted + accepted, self.expected + expected
        if self.rounds < self.every or not self.expected:
            return None
        share = self.accepted / self.expected
        text = f"{self.accepted} tokens were accepted in {self.rounds} rounds, {share:.0%} of those that the head expected"
        self.rounds, self.accepted, self.expected = 0, 0, 0.0
        if abs(share - 1) <= LARGEST_DRIFT:
            return text, False
        return f"{text}: its predictions do not hold on these prompts; {REMEDY}", True


def expected_of(stopping: StoppingRule, verification: Verification, state: Any, row: int = 0) -> float | None:
    """Return the number for a row of the rule's state, over a prompt; None where the rule expects none.

    It is None under other rules than token verification, too, whose acceptance predictions do not speak of.
    """
    expected = stopping.num_expected(state) if isinstance(verification, TokenVerification) else None
    return None if expected is None else float(expected[row])
