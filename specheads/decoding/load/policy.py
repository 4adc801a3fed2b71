"""The base of all policies on the load, and what they share."""

from typing import ClassVar

import numpy as np

from specheads.decoding.arguments import check_count
from specheads.decoding.load.drafts import Drafts

MAX_TOKENS = 8  # usual longest draft; a batch drafts in lockstep, so deeper drafts rarely pay


class LoadPolicy:
    """Decides for a whole batch how deep each request drafts, and how many of its tokens are submitted.

    A round runs through `begin_round`, draft steps that all rows which still draft make together, `admit`, and after verification
    `learn`. The caller drafts in a row only while `drafting_rows` says so, which asks `goes_on` after each step of a round that
    `follows_drafts`. One policy serves all rounds of a batch: what it learns is shared by the requests.

    The output of every request stays the target's under token verification if whether token j of a row is submitted depends on
    nothing of that row but tokens 1 to j - 1 and what was known before token j was sampled. `lossless` says whether a policy
    keeps to that in sampling.
    """

    lossless: ClassVar[bool] = True
    needs: frozenset[str] = frozenset()  # the features of drafted tokens that it reads
    keeps_rule: bool = False  # whether the decoder's stopping rule ends the drafts of rows, too
    follows_drafts: bool = False  # whether this round's drafts decide how long they get
    admits: bool = False  # whether `admit` predicts and weighs the tokens of this round, which takes its time

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        check_count("max_tokens", max_tokens)
        self.max_tokens = max_tokens

    def rests(self, num_requests: int, positions: int = 0) -> bool:
        """Return whether no row of this round drafts, whatever the rows are; then the round has no other calls.

        `positions` are those of all rows in memory.

        It needs no `Drafts`, whose arrays take as long as a tenth of a small model's step. Always False is right, too.
        """
        return False

    def begin_round(self, drafts: Drafts) -> int:
        """Return the most tokens that each row drafts in the round, before the first of them; called even if no row can draft."""
        return self.max_tokens

    def goes_on(self, drafts: Drafts) -> np.ndarray:
        """Return which rows draft one more token, (R,) bool, where drafts decide that; asked from the second token on."""
        return np.ones(drafts.num_requests, dtype=bool)

    def admit(self, drafts: Drafts) -> np.ndarray:
        """Return how many of its drafted tokens each row submits, (R,) long."""
        return drafts.lengths

    def learn(self, drafts: Drafts, num_submitted: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        """Take in a round's outcome: tokens submitted and accepted, (R,) long each, and the seconds that it took."""


def drafting_rows(policy: LoadPolicy, drafts: Drafts, ended: np.ndarray, most: int) -> np.ndarray:
    """Return which rows take part in the next draft step, (R,) bool: those that never stopped and that the policy lets go on.

    Args:
        ended: (R,) bool, rows whose draft has emitted an end-of-sequence token.
        most: what `begin_round` returned.
    """
    step = drafts.longest
    able = ~ended & (drafts.lengths == step) & (drafts.lengths < drafts.capacity) & (step < most)
    return able & policy.goes_on(drafts) if step and policy.follows_drafts and able.any() else able


def decided(drafts: Drafts, num_submitted: np.ndarray, num_accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which places hold accepted tokens and which hold tokens whose outcome is known, (R, K) bool each.

    Verification decides the accepted tokens and the first rejected one; whether later ones would have been accepted is unknown.
    """
    place = np.arange(drafts.longest)
    return place < num_accepted[:, None], place < np.minimum(num_accepted + 1, num_submitted)[:, None]
