"""The interface of drafting methods: a choice, and the drafter that one decoder makes of it."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from specheads.decoding.drafting.draft_memory import DraftMemory
from specheads.decoding.engine import Engine
from specheads.decoding.records import CHAIN, Draft
from specheads.decoding.stopping import StoppingRule
from specheads.pair import Pair
from specheads.sampling import Uniforms, Warp


class Drafter(Protocol):
    """Drafts for one decoder, round by round."""

    def warm_up(self, ends: Tensor) -> None:
        """Prepare the engine for all that drafting runs."""

    def draft(
        self, committed: Sequence[int], state: Any, limit: int, uniforms: Uniforms, ends: Tensor, num_probs_needed: int = 0
    ) -> Draft:
        """Return a draft after the committed tokens. The draft model has not read the last of them, and maybe more.

        Args:
            state: of the stopping rule, B = 1.
            limit: the longest useful path.
            uniforms: the numbers at which tokens are sampled.
            ends: (V,) bool, the tokens that end a response and therefore a path.
            num_probs_needed: coming tokens whose verification needs the draft's distribution; a shorter chain brings the
                distribution after its last token.
        """

    def after(self, path: Sequence[int]) -> tuple[Any, int, int]:
        """Return the stopping rule's state along a path of the last draft, and the numbers of its tokens and of accepted ones.

        Args:
            path: the accepted nodes, with which that path begins.
        """

    def keep(self, path: Sequence[int]) -> None:
        """Forget the last draft except for the accepted nodes `path`."""


class Drafting:
    """`drafting=`: how tokens are proposed.

    A new method is a subclass in a new file and a config in conf/drafting/ whose `_target_` names it.
    """

    reads_draft = True  # whether a draft model is run

    @property
    def kind(self) -> str:
        """How tokens are chosen, which decides what may verify them."""
        return CHAIN

    def usual_verification(self) -> Any:
        """Return the Verification of such drafts unless another one is chosen; None: token verification."""
        return None

    @property
    def single_candidate(self) -> bool:
        """Whether a draft is a chain, however its tokens were chosen."""
        return self.kind == CHAIN

    def pair(self, pair: Pair) -> Pair:
        """Return the pair that decodes: a method that makes a draft replaces the pair's draft."""
        return pair

    def most_read(self, max_tokens: int) -> int:
        """Return how many positions beyond the text the draft model may write, where paths have up to `max_tokens` tokens."""
        return 0

    def most_verified(self, max_tokens: int) -> int:
        """Return the nodes of the largest draft that goes to verification, where paths have up to `max_tokens` tokens."""
        return max_tokens

    def drafter(self, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> Drafter:
        """Return the drafter for these choices; chains are written into `memory`.

        Raises:
            UserError: a rule that needs features which this method does not have.
        """
        raise NotImplementedError
