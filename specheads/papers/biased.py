"""Rules for chains that let more drafted tokens pass than the target's distribution allows: by a margin, and BiLD's."""

from typing import Literal, get_args

import torch

from specheads.decoding.stopping import MaxProbability
from specheads.decoding.verification import AcceptanceDistribution, Block, VerificationRule
from specheads.pair.sampling import accept_prob
from specheads.settings import NonNegativeNumber, PositiveCount, Probability, check

Mode = Literal["opt", "uno"]
MODES = get_args(Mode)


class BiasedVerification(VerificationRule):
    """`verification=biased`: each drafted token passes with `b = min(1, (t + eps) / d)`. Lossy unless `eps` is 0 and `mode` opt.

    A rejection is followed by a token of `norm((t - b d)+)`, which is `norm((t - d)+)` whatever eps (`mode="opt"`, the least bias
    that these probabilities allow), or of the target (`mode="uno"`).

    Source: Yin et al. 2024, section 4.
    """

    name = "biased"

    def __init__(self, eps: float = 0.1, mode: str = "opt") -> None:
        check("verification.eps", eps, Probability, "the margin added to the target's probability, for example 0.1")
        check("verification.mode", mode, Mode)
        self.eps, self.mode = eps, mode
        self.compile_key = ("biased", eps, mode)
        self.lossless = eps == 0 and mode == "opt"
        self.label = f"biased verification, eps {eps:g}, {mode}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        draft_prob, target_prob = block.drafted_probs()
        passes = torch.where(block.within, accept_prob(target_prob + self.eps, draft_prob), 0.0)
        weights = torch.ones_like(passes) if self.mode == "opt" else None
        return AcceptanceDistribution(survival=passes.cumprod(dim=1), weights=weights, block=block)


class BigLittle(VerificationRule):
    """`verification=big_little`: keep drafted tokens up to the first that the draft is unsure of or the target finds unlikely.

    The target's token follows there. Lossy.

    Args:
        fallback: the draft is unsure where no probability of its distribution reaches this; drafts end there, unless another
            stopping rule is chosen (which reads the plain softmax, while this reads the warped distribution).
        rollback: nats; a token is unlikely whose negative log-likelihood under the target exceeds it.
        max_tokens: the longest draft of the stopping rule that belongs to it.

    Source: BiLD (Kim et al. 2023), section 3.
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
