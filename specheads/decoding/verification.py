"""Rules for chains: their base, and token verification, block verification, and acceptance at a
given rate.

A rule computes the joint distribution of accepted and next tokens without randomness; tests
enumerate the distribution that decoding samples from. Token and block verification are lossless,
and at temperature 0 they compare the drafted prefix with the target's argmax. Both accept the
longest prefix that passes its test; they differ in the running ratio of target and draft, which
block verification never lets pass 1.

A new rule for chains is a function `Block -> AcceptanceDistribution` and a VerificationRule that
calls it, in any module: its `name` is that of its config in conf/verification/, whose `_target_`
names the class.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.records import CHAIN, short_repr
from specheads.decoding.stopping import StoppingRule
from specheads.pair.sampling import accept_prob, at_least_float32, sample
from specheads.settings import Probability, argument, check_arguments

# e^46 = 1e20: beyond it the draft's distribution no longer changes a residual.
LARGEST_LOG_WEIGHT = 46.0


@dataclass(frozen=True)
class Block:
    """Drafted chains of B rows of up to K tokens, and both models' warped distributions along them,
    in float32 or wider.
    """

    tokens: Tensor  # (B, K) long
    draft_probs: Tensor  # (B, K, V), which each token was sampled from
    target_probs: Tensor  # (B, K + 1, V), the target's at each drafted position and after the last
    lengths: Tensor  # (B,) long, tokens drafted

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        lengths: Tensor | None = None,
    ) -> "Block":
        """Return the block of these tensors; `lengths` default to K.

        Raises ValueError for shapes that do not fit together.
        """
        batch, num_drafted = tokens.shape
        wanted = (batch, num_drafted + 1, draft_probs.shape[2])
        if draft_probs.shape[:2] != tokens.shape or target_probs.shape != wanted:
            shapes = [tuple(each.shape) for each in (tokens, draft_probs, target_probs)]
            raise ValueError(
                f"shapes {shapes} of tokens and distributions do not agree; expected (B, K), (B, K,"
                " V) and (B, K + 1, V)"
            )
        if lengths is None:
            lengths = torch.full((batch,), num_drafted, device=tokens.device)
        return cls(tokens, at_least_float32(draft_probs), at_least_float32(target_probs), lengths)

    @property
    def num_drafted(self) -> int:
        """K, the most tokens of a row."""
        return self.tokens.shape[1]

    @property
    def within(self) -> Tensor:
        """(B, K) bool, which tokens were drafted."""
        return torch.arange(self.num_drafted, device=self.tokens.device) < self.lengths[:, None]

    def drafted_probs(self) -> tuple[Tensor, Tensor]:
        """Return the probability of each drafted token under draft and target, (B, K) each."""
        index = self.tokens.unsqueeze(-1)
        draft_prob = self.draft_probs.gather(-1, index).squeeze(-1)
        target_prob = self.target_probs[:, :-1].gather(-1, index).squeeze(-1)
        return draft_prob, target_prob

    def log_ratios(self) -> Tensor:
        """Return log t(y_i) / d(y_i) (B, K) in float64, 0 beyond a row's length."""
        draft_prob, target_prob = self.drafted_probs()
        # A token that the draft cannot have sampled has minus infinity, and so is rejected.
        ratio = target_prob.double().log() - draft_prob.double().log()
        ratio = torch.where(draft_prob > 0, ratio, -torch.inf)
        return torch.where(self.within, ratio, 0.0)


@dataclass(frozen=True)
class AcceptanceDistribution:
    """The distribution of a verified block's outcome.

    After n < length accepted tokens the next one follows `norm((weights[n] t - d)+)`, where t and d
    are the distributions of target and draft there, or t if there are no weights; after all of them
    it follows t.
    """

    # (B, K), the probability that at least i = 1 .. K tokens are accepted: falling, 0 beyond a
    # row's length
    survival: Tensor
    weights: Tensor | None  # (B, K)
    block: Block

    @property
    def length_probs(self) -> Tensor:
        """(B, K + 1), the probability that exactly n tokens are accepted."""
        ends = torch.nn.functional.pad(self.survival, (1, 0), value=1.0)
        return ends - torch.nn.functional.pad(self.survival, (0, 1))

    def next_probs(self, num_accepted: Tensor) -> Tensor:
        """Return the unnormalised distribution of the next token (B, V) after `num_accepted`
        (B,).
        """
        block = self.block
        rows = torch.arange(num_accepted.shape[0], device=num_accepted.device)
        target = block.target_probs[rows, num_accepted]
        if self.weights is None or not block.num_drafted:
            return target
        rejected = num_accepted.clamp_max(block.num_drafted - 1)
        weight = self.weights[rows, rejected].to(target.dtype)
        residual = (weight[:, None] * target - block.draft_probs[rows, rejected]).clamp_min(0)
        # Where two distributions differ by rounding alone a residual is empty, and the target's
        # distribution is as close.
        corrected = (num_accepted < block.lengths)[:, None] & (
            residual.sum(dim=-1, keepdim=True) > 0
        )
        return torch.where(corrected, residual, target)

    def decide(self, uniform: Tensor, next_uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of accepted tokens (B,) long, and the target's token after them (B,)
        long.

        `uniform` (B,) decides the former, `next_uniform` (B,) the latter.
        """
        num_accepted = (uniform[:, None] < self.survival).sum(dim=1)
        return num_accepted, sample(self.next_probs(num_accepted), next_uniform)


class Verification:
    """Decides how much of a draft is accepted."""

    name: str  # the name of its config, conf/verification/<name>.yaml
    label: str  # its name in reports
    compile_key: Hashable  # rules with equal keys decide alike
    lossless: bool = True  # whether the output follows the target's distribution
    # Whether at temperature 0 it accepts the drafted tokens that are the target's most likely ones
    compares: bool = False
    stopping: StoppingRule | None = None  # the default stopping rule
    takes: frozenset[str]  # the kinds of drafts that it can verify
    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Raise UserError for an `argument` that is of another type."""
        check_arguments(self, "verification")


def compared(tokens: Tensor, best: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `AcceptanceDistribution.decide` does at temperature 0 of a rule that compares
    `tokens` (B, K), drafted up to `lengths` (B,), with the target's most likely ones, `best`
    (B, K + 1).
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    passes = (tokens == best[:, :-1]) & (places < lengths[:, None])
    num_accepted = passes.long().cumprod(dim=1).sum(dim=1)
    return num_accepted, best.gather(1, num_accepted[:, None]).squeeze(1)


class VerificationRule(Verification):
    """Decides how much of a chain is accepted: the base of rules for chains."""

    takes = frozenset({CHAIN})

    def distribution(self, block: Block) -> AcceptanceDistribution:
        raise NotImplementedError


def token_distribution(block: Block) -> AcceptanceDistribution:
    """Accept each drafted token with `min(1, t / d)`, up to the first rejection (Leviathan et al.
    2023, algorithm 1).
    """
    draft_prob, target_prob = block.drafted_probs()
    passes = torch.where(block.within, accept_prob(target_prob, draft_prob), 0.0)
    return AcceptanceDistribution(
        survival=passes.cumprod(dim=1), weights=torch.ones_like(passes), block=block
    )


class TokenVerification(VerificationRule):
    """`verification=token`: see `token_distribution`."""

    name = compile_key = "token"
    compares = True
    label = "token verification"
    distribution = staticmethod(token_distribution)


def block_distribution(block: Block) -> AcceptanceDistribution:
    """Accept the longest prefix of each block that passes its test (Sun et al. 2024, algorithm
    2).
    """
    return prefix_distribution(block, reflected(block.log_ratios()))


def reflected(log_ratios: Tensor) -> Tensor:
    """Return log p_i (B, K), `p_i = min(1, p_{i-1} exp(log_ratios_i))`, p_0 = 1."""
    if not log_ratios.shape[1]:
        return log_ratios
    # A walk that may not exceed 0 is the free walk minus the largest height it has reached so far.
    walk = log_ratios.cumsum(dim=1)
    return walk - walk.cummax(dim=1).values.clamp_min(0)


def prefix_distribution(block: Block, log_weights: Tensor) -> AcceptanceDistribution:
    """Return the acceptance distribution of the rule that accepts the longest prefix of a block
    that passes its test.

    A prefix of i < K tokens passes with probability `E / (E + 1 - p_i)`, `E = sum (p_i t - d)+`
    over the token after it, and with certainty where p_i >= 1; all K tokens pass with `min(1,
    p_K)`. `log_weights` (B, K) float64 are log p_i, the running ratio.
    """
    weights = log_weights.clamp_max(LARGEST_LOG_WEIGHT).exp()
    # p_0 .. p_{K-1}
    before = torch.nn.functional.pad(weights, (1, 0), value=1.0)[:, : weights.shape[1]]
    last = torch.arange(1, block.num_drafted + 1, device=weights.device) == block.lengths[:, None]
    reach = before[:, :, None].to(block.target_probs.dtype) * block.target_probs[:, :-1]
    excess = (reach - block.draft_probs).clamp_min(0).sum(dim=-1).double()
    # Prefix i + 1 comes next to prefix i; the last one is tested differently.
    excess = excess.roll(-1, dims=1)
    missing = (1 - weights).clamp_min(0)
    # With p_i >= 1 nothing is missing and the prefix passes, also where the excess is 0.
    chance = excess / (excess + missing.clamp_min(torch.finfo(missing.dtype).tiny))
    inner = torch.where(missing > 0, chance, 1.0)
    passes = torch.where(last, weights.clamp_max(1.0), inner)
    passes = torch.where(block.within, passes, 0.0)
    survival = 1 - (1 - passes).flip(1).cumprod(dim=1).flip(1)
    return AcceptanceDistribution(survival=survival, weights=before, block=block)


class BlockVerification(VerificationRule):
    """`verification=block`: see `block_distribution`."""

    name = compile_key = "block"
    compares = True
    label = "block verification"
    distribution = staticmethod(block_distribution)


@dataclass(eq=False)
class SyntheticVerification(VerificationRule):
    """`verification=synthetic`: tokens are accepted with probability `rate` up to a rejection.

    Not the target's output.
    """

    name = "synthetic"
    lossless = False
    rate: Probability = argument(
        0.8, "the probability that a drafted token is accepted, for example 0.8"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compile_key = ("synthetic", self.rate)
        self.label = f"synthetic acceptance at rate {self.rate:g}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        passes = torch.where(block.within, self.rate, 0.0)
        return AcceptanceDistribution(survival=passes.cumprod(dim=1), weights=None, block=block)
