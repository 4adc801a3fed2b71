"""The interface of drafting methods."""

from collections.abc import Sequence
from typing import Any

from specheads.decoding.draft_memory import DraftMemory
from specheads.decoding.engine import Engine
from specheads.decoding.records import CHAIN
from specheads.decoding.rows import Rounds
from specheads.decoding.stopping import StoppingRule
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp


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

    def pair(self, pair: Pair) -> Pair:
        """Return the pair that decodes: a method that makes a draft replaces the pair's draft."""
        return pair

    def most_read(self, max_tokens: int) -> int:
        """Return how many positions beyond the text the draft model may write, where paths have up to `max_tokens` tokens."""
        return 0

    def most_verified(self, max_tokens: int) -> int:
        """Return how many positions beyond the text the target may write, where paths have up to `max_tokens` tokens."""
        return 0

    def rounds(
        self,
        pair: Pair,
        engines: Sequence[Engine],
        stopping: StoppingRule,
        verification: Any,
        warp: Warp,
        memory: DraftMemory,
    ) -> Rounds:
        """Return how rows draft and verify by these choices.

        Args:
            engines: the target's, and the draft's where `reads_draft`; with memory of one text, or of a batch's rows and one
                more.
            memory: of chains, on the draft's device; decoders that share an engine share it, too.

        Raises:
            UserError: a rule that needs features which this method does not have; a batch where it drafts for one row only.
        """
        raise NotImplementedError
