"""BiLD (Kim et al. 2023): the draft writes until it is unsure, and is rolled back where the target strongly disagrees."""

from specheads.decoding.stopping import MaxProbability
from specheads.decoding.verification.rule import AcceptanceDistribution, Block, VerificationRule
from specheads.settings import NonNegativeNumber, PositiveCount, Probability, check


class BigLittle(VerificationRule):
    """`verification=big_little`: keep drafted tokens up to the first that the draft is unsure of or the target finds unlikely.

    The target's token follows there. Lossy.

    Args:
        fallback: the draft is unsure where no probability of its distribution reaches this; drafts end there, unless another
            stopping rule is chosen (which reads the plain softmax, while this reads the warped distribution).
        rollback: nats; a token is unlikely whose negative log-likelihood under the target exceeds it.
        max_tokens: the longest draft of the stopping rule that belongs to it.

    Source: Kim et al. 2023, section 3.
    """

    name = "big_little"
    lossless = False

    def __init__(self, fallback: float = 0.9, rollback: float = 2.0, max_tokens: int = 10) -> None:
        check("verification.fallback", fallback, Probability, "a probability under the draft, for example 0.9")
        check("verification.rollback", rollback, NonNegativeNumber, "a negative log-likelihood in nats, for example 2")
        check("verification.max_tokens", max_tokens, PositiveCount)
        self.stopping = MaxProbability(fallback, max_tokens)
        self.fallback, self.rollback = fallback, rollback
        self.compile_key = ("big little", fallback, rollback)
        self.label = f"BiLD, fallback {fallback:g}, rollback {rollback:g}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        _, target_prob = block.drafted_probs()
        sure = block.draft_probs.amax(dim=-1) >= self.fallback
        passes = block.within & sure & (-target_prob.log() <= self.rollback)
        return AcceptanceDistribution(survival=passes.to(target_prob.dtype).cumprod(dim=1), weights=None, block=block)
