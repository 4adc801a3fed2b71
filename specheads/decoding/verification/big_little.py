"""BiLD (Kim et al. 2023): the small model writes until it is unsure, and is rolled back where the large one strongly disagrees."""

from specheads.decoding.stopping import MaxProbability
from specheads.decoding.verification.law import AcceptanceLaw, Block
from specheads.decoding.verification.step import ChainVerification
from specheads.errors import UserError, is_number


class BigLittle(ChainVerification):
    """`verification=big_little`: keep drafted tokens up to the first whose negative log-likelihood under the target exceeds `rollback`.

    There the target's own token stands. Lossy. `fallback`: drafts end below this largest probability of the draft, unless another
    stopping rule is chosen.

    Source: Kim et al. 2023, section 3.
    """

    lossless = False

    def __init__(self, fallback: float = 0.9, rollback: float = 2.0, max_tokens: int = 10) -> None:
        if not is_number(rollback) or rollback < 0:
            raise UserError(f"verification.rollback={rollback} is not a number >= 0; it is a distance in nats, for example 2.")
        self.stopping = MaxProbability(fallback, max_tokens)
        self.rollback = rollback
        self.program = ("big little", rollback)

    @property
    def label(self) -> str:
        return f"BiLD, rollback {self.rollback:g}"

    def law(self, block: Block) -> AcceptanceLaw:
        _, wanted = block.drafted_probs()
        passes = block.within & (-wanted.log() <= self.rollback)
        return AcceptanceLaw(survival=passes.to(wanted.dtype).cumprod(dim=1), weights=None, block=block)
