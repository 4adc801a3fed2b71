"""BiLD (Kim et al. 2023): the small model writes until it is unsure, and is rolled back where the large one strongly disagrees."""

from specheads.decoding.stopping import MaxProbability
from specheads.decoding.verification.chain_distribution import AcceptanceDistribution, Block
from specheads.decoding.verification.step import ChainVerification
from specheads.errors import UserError, is_count, is_number


class BigLittle(ChainVerification):
    """`verification=big_little`: keep drafted tokens up to the first that the draft is unsure of or the target finds unlikely.

    There the target's own token stands. Lossy.

    Args:
        fallback: the draft is unsure where no probability of its law reaches this; drafts end there, unless another stopping rule is
            chosen (which reads the plain softmax, while this reads the warped law).
        rollback: nats; a token is unlikely whose negative log-likelihood under the target exceeds it.
        max_tokens: longest draft of its own stopping rule.

    Source: Kim et al. 2023, section 3.
    """

    lossless = False

    def __init__(self, fallback: float = 0.9, rollback: float = 2.0, max_tokens: int = 10) -> None:
        if not is_number(fallback) or not 0 <= fallback <= 1:
            raise UserError(
                f"verification.fallback={fallback} is outside [0, 1]; it is a probability of the draft's, such as 0.9."
            )
        if not is_number(rollback) or rollback < 0:
            raise UserError(f"verification.rollback={rollback} is not a number >= 0; it is a distance in nats, for example 2.")
        if not is_count(max_tokens, least=1):
            raise UserError(f"verification.max_tokens={max_tokens} is no count of at least 1.")
        self.stopping = MaxProbability(fallback, max_tokens)
        self.fallback, self.rollback = fallback, rollback
        self.compile_key = ("big little", fallback, rollback)

    @property
    def label(self) -> str:
        return f"BiLD, fallback {self.fallback:g}, rollback {self.rollback:g}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        _, wanted = block.drafted_probs()
        sure = block.draft_probs[:, : block.num_drafted].amax(dim=-1) >= self.fallback
        passes = block.within & sure & (-wanted.log() <= self.rollback)
        return AcceptanceDistribution(survival=passes.to(wanted.dtype).cumprod(dim=1), weights=None, block=block)
