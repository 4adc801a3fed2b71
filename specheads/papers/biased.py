"""Rules for chains that let more drafted tokens pass than the target's distribution allows: by a
margin, and BiLD's.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from specheads.decoding.stopping import MaxProbability
from specheads.decoding.verification import AcceptanceDistribution, Block, VerificationRule
from specheads.pair.sampling import accept_prob
from specheads.settings import NonNegativeNumber, PositiveCount, Probability, argument

Mode = Literal["opt", "uno"]
MODES = get_args(Mode)


@dataclass(eq=False)
class BiasedVerification(VerificationRule):
    """`verification=biased`: each drafted token passes with `b = min(1, (t + eps) / d)`.

    Lossy unless `eps` is 0 and `mode` opt.

    A rejection is followed by a token of `norm((t - b d)+)`, which is `norm((t - d)+)` whatever eps
    (`mode="opt"`, the least bias that these probabilities allow), or of the target (`mode="uno"`).

    Source: Yin et al. 2024, section 4.
    """

    name = "biased"
    eps: Probability = argument(
        0.1, "the margin added to the target's probability, for example 0.1"
    )
    mode: Mode = argument("opt", "what follows a rejection")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compile_key = ("biased", self.eps, self.mode)
        self.lossless = self.eps == 0 and self.mode == "opt"
        self.label = f"biased verification, eps {self.eps:g}, {self.mode}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        draft_prob, target_prob = block.drafted_probs()
        passes = torch.where(block.within, accept_prob(target_prob + self.eps, draft_prob), 0.0)
        weights = torch.ones_like(passes) if self.mode == "opt" else None
        return AcceptanceDistribution(survival=passes.cumprod(dim=1), weights=weights, block=block)


@dataclass(eq=False)
class BigLittle(VerificationRule):
    """`verification=big_little`: keep drafted tokens up to the first that the draft is unsure of or
    the target finds unlikely.

    The target's token follows there. Lossy. The draft is unsure where no probability of its
    distribution reaches `fallback`; drafts end there, unless another stopping rule is chosen (which
    reads the plain softmax, while this reads the warped distribution). A token is unlikely whose
    negative log-likelihood under the target exceeds `rollback`.

    Source: BiLD (Kim et al. 2023), section 3.
    """

    name = "big_little"
    lossless = False
    fallback: Probability = argument(0.9, "a probability under the draft, for example 0.9")
    rollback: NonNegativeNumber = argument(2.0, "a negative log-likelihood in nats, for example 2")
    max_tokens: PositiveCount = argument(
        10, "the longest draft of the stopping rule that belongs to it"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stopping = MaxProbability(self.fallback, self.max_tokens)
        self.compile_key = ("big little", self.fallback, self.rollback)
        self.label = f"BiLD, fallback {self.fallback:g}, rollback {self.rollback:g}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        _, target_prob = block.drafted_probs()
        sure = block.draft_probs.amax(dim=-1) >= self.fallback
        passes = block.within & sure & (-target_prob.log() <= self.rollback)
        return AcceptanceDistribution(
            survival=passes.to(target_prob.dtype).cumprod(dim=1), weights=None, block=block
        )
