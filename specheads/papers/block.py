"""Greedy block verification (Sun et al. 2024, appendix): as many accepted tokens per block as any lossless rule can reach.

It accepts more than the target's distribution allows, and corrects for it afterwards: up to the index at which a rejected block
would have ended, tokens follow a *modified target* `norm((r t - d)+)`, where r is the ratio T/D of the joint probabilities of the
tokens emitted since the block began. Blocks of later rounds are verified against it, and a rejection among them modifies it
again: modifications nest.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specheads.decoding.records import Verdict
from specheads.decoding.verification.chains import prefix_distribution, reflected
from specheads.decoding.verification.rule import LARGEST_LOG_WEIGHT, AcceptanceDistribution, Block, VerificationRule
from specheads.settings import PositiveCount, check


class Levels(NamedTuple):
    """The modifications in force, oldest first: each applies to the distribution that the older ones leave."""

    log_ratio: Tensor  # (B, L) float64, log r
    left: Tensor  # (B, L) long, coming tokens that it applies to; 0: the level is free

    @classmethod
    def none(cls, batch: int, num_levels: int, device: torch.device) -> "Levels":
        """Return free levels: the unmodified target."""
        zeros = torch.zeros(batch, num_levels, dtype=torch.long, device=device)
        return cls(zeros.double(), zeros)

    @property
    def num_probs_needed(self) -> Tensor:
        """(B,) long, how many coming tokens need the draft's distribution to be verified."""
        return self.left.amax(dim=1) if self.left.shape[1] else self.left.sum(dim=1)


def _modified_targets(levels: Levels, block: Block) -> tuple[Tensor, Levels]:
    """Return the distributions that a block is verified against (B, K + 1, V), and the levels before each position (B, L, K + 1).

    `block.draft_probs` are (B, K + 1, V).
    """
    count = block.num_drafted + 1
    left = (levels.left[:, :, None] - torch.arange(count, device=levels.left.device)).clamp_min(0)
    target, log_ratios = block.target_probs, []
    for number in range(levels.left.shape[1]):
        steps = replace(block, target_probs=target).log_ratios()
        walk = torch.nn.functional.pad(steps.cumsum(dim=1), (1, 0))
        log_ratios.append(levels.log_ratio[:, number, None] + walk)
        target = _modified(target, block.draft_probs, log_ratios[-1], left[:, number])
    log_ratio = torch.stack(log_ratios, dim=1) if log_ratios else left.double()
    return target, Levels(log_ratio, left)


def _modified(target: Tensor, draft: Tensor, log_ratio: Tensor, left: Tensor) -> Tensor:
    """Return `norm((r t - d)+)` (..., V) where tokens are `left` (...), and t elsewhere, or where nothing is left of it."""
    weight = log_ratio.clamp_max(LARGEST_LOG_WEIGHT).exp().to(target.dtype)
    residual = (weight.unsqueeze(-1) * target - draft).clamp_min(0)
    total = residual.sum(dim=-1, keepdim=True)
    holds = (left > 0).unsqueeze(-1) & (total > 0)
    return torch.where(holds, residual / torch.where(total > 0, total, 1.0), target)


def _after_token(levels: Levels, target: Tensor, draft: Tensor, token: Tensor) -> tuple[Levels, Tensor]:
    """Return the levels after one more emitted `token` (B,), and that token's log ratio (B,) under the distribution they leave.

    Args:
        levels: before it.
        target, draft: (B, V), the unmodified distributions there.
    """

    def log_prob(probs: Tensor) -> Tensor:
        return probs.double().gather(1, token[:, None]).log().squeeze(1)

    # A token that the draft never proposes makes the ratio infinite, which ends the modification.
    draft_log_prob, log_ratios = log_prob(draft), []
    for number in range(levels.left.shape[1]):
        log_ratios.append(levels.log_ratio[:, number] + log_prob(target) - draft_log_prob)
        target = _modified(target, draft, levels.log_ratio[:, number], levels.left[:, number])
    log_ratio = torch.stack(log_ratios, dim=1) if log_ratios else levels.log_ratio
    return _compacted(Levels(log_ratio, (levels.left - 1).clamp_min(0))), log_prob(target) - draft_log_prob


def _compacted(levels: Levels) -> Levels:
    """Free the levels that no longer modify anything, and move the others to the front in their order."""
    left = torch.where(levels.log_ratio.isfinite(), levels.left, 0)
    order = (left == 0).long().argsort(dim=1, stable=True)
    log_ratio = torch.where(left > 0, levels.log_ratio, 0.0)
    return Levels(log_ratio.gather(1, order), left.gather(1, order))


@dataclass(frozen=True)
class NestedDistribution:
    """The distribution of a verified block's outcome under the modifications in force."""

    distribution: AcceptanceDistribution  # the block against the modified target
    plain: Block  # the block with the unmodified target
    before: Levels  # before each position, (B, L, K + 1)
    modifies: Tensor  # (B,) bool, whether a rejection adds a level

    @classmethod
    def of(cls, levels: Levels, block: Block) -> "NestedDistribution":
        """Return the distribution for a block whose `draft_probs` are (B, K + 1, V).

        A row whose levels are all in use falls back to block verification, which modifies nothing, and so does one whose length
        was not known beforehand: the reach of its modification would depend on drafts that were not made.
        """
        target, before = _modified_targets(levels, block)
        modified = replace(block, target_probs=target)
        modifies = (levels.left == 0).any(dim=1) & (block.planned > 0)
        steps = modified.log_ratios()
        distribution = prefix_distribution(modified, torch.where(modifies[:, None], steps.cumsum(dim=1), reflected(steps)))
        return cls(distribution, block, before, modifies)

    def after(self, num_accepted: Tensor, next_token: Tensor) -> Levels:
        """Return the levels once `num_accepted` (B,) drafted tokens and `next_token` (B,) are emitted."""
        rows, plain = torch.arange(num_accepted.shape[0], device=num_accepted.device), self.plain
        here = Levels(self.before.log_ratio[rows, :, num_accepted], self.before.left[rows, :, num_accepted])
        probs = plain.target_probs[rows, num_accepted], plain.draft_probs[rows, num_accepted]
        old, step = _after_token(here, *probs, next_token)
        walk = torch.nn.functional.pad(self.distribution.block.log_ratios().cumsum(dim=1), (1, 0))[rows, num_accepted]
        adds = self.modifies & (num_accepted < plain.lengths)
        left = torch.where(adds, plain.planned - num_accepted - 1, 0)
        grown = Levels(torch.cat([old.log_ratio, (walk + step)[:, None]], dim=1), torch.cat([old.left, left[:, None]], dim=1))
        # Levels in use come first, so that the one dropped is free.
        return Levels(*(part[:, :-1] for part in _compacted(grown)))


class GreedyBlockVerification(VerificationRule):
    """`verification=greedy_block`: accept the longest prefix of each block that passes, and modify the target for the next ones.

    Blocks whose length is not known before they are drafted fall back to block verification, and so do those that would need more
    than `num_levels` nested modifications: every step costs as much for a level in use as for a free one.

    Source: Sun et al. 2024, appendix on greedy block verification.
    """

    name = "greedy_block"
    label = "greedy block verification"
    reads_next_probs = True
    reads_planned = True

    def __init__(self, num_levels: int = 4) -> None:
        check("verification.num_levels", num_levels, PositiveCount)
        self.num_levels = num_levels
        self.compile_key = ("greedy block", num_levels)

    def start_prompt(self, batch: int, device: torch.device) -> Levels:
        """Return free levels."""
        return Levels.none(batch, self.num_levels, device)

    def __call__(self, state: Levels, block: Block, uniform: Tensor, next_uniform: Tensor) -> tuple[Verdict, Levels]:
        nested = NestedDistribution.of(state, block)
        verdict = nested.distribution.decide(uniform, next_uniform)
        levels = nested.after(verdict.num_accepted, verdict.next_token)
        return replace(verdict, num_probs_needed=levels.num_probs_needed), levels
