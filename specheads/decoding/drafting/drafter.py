"""What every way of drafting is: a choice, and what drafts by it for one decoder."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from specheads.decoding.drafting.memory import DraftMemory
from specheads.decoding.engine import Engine
from specheads.decoding.records import Draft, DraftKind
from specheads.decoding.stopping import StoppingRule
from specheads.pair import Pair
from specheads.sampling import Uniforms, Warp


class Drafter(Protocol):
    """Drafts for one decoder, round by round."""

    def warm_up(self, ends: Tensor) -> None:
        """Prepare the engine for all that drafting runs."""

    def draft(
        self, committed: Sequence[int], state: Any, limit: int, draws: Uniforms, ends: Tensor, num_probs_needed: int = 0
    ) -> Draft:
        """Return a draft behind the committed tokens, whose last at least the draft model has not read.

        Args:
            state: of the stopping rule, B = 1.
            limit: the longest path that is of use.
            ends: (V,) bool, the tokens that end a response and therefore a path.
            owed: tokens to come whose verification needs the draft's law; a shorter chain carries the law after its last token.
        """

    def after(self, path: Sequence[int]) -> tuple[Any, int, int]:
        """Return what the stopping rule is to learn of the last draft, of which the nodes `path` were accepted: its state along a path
        that begins with these, the path's length and how much of it was accepted.
        """

    def keep(self, path: Sequence[int]) -> None:
        """Forget what was read of the last draft, but for the accepted nodes `path`."""


class Drafting:
    """`drafting=`: how tokens are proposed."""

    kind: DraftKind
    reads_draft = True  # whether a draft model is run

    def pair(self, pair: Pair) -> Pair:
        """Return the pair that decodes: one that brings a draft of its own puts it in the place of the pair's."""
        return pair

    def most_read(self, max_tokens: int) -> int:
        """Return how many positions beyond the text the draft model may write, where paths have up to `max_tokens` tokens."""
        return 0

    def most_verified(self, max_tokens: int) -> int:
        """Return the nodes of the largest draft that goes to verification, where paths have up to `max_tokens` tokens."""
        return max_tokens

    def drafter(self, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> Drafter:
        """Return what drafts with these choices; chains go into `memory`.

        Raises:
            UserError: a rule that looks at what this way of drafting does not know.
        """
        raise NotImplementedError
