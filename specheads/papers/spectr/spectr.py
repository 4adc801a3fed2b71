"""SpecTr (Sun et al. 2023): k-sequential selection tests all samples at a node against one distribution, lowered by rho."""

import torch
from torch import Tensor

from specheads.papers.trees.distribution import IID, TreeBlock, TreeDistribution, TreeVerification

NUM_HALVINGS = 40  # of an interval of length k - 1; the remaining error only lowers the acceptance


def spectr_distribution(block: TreeBlock) -> TreeDistribution:
    """Return the acceptance distribution of `verification=spectr`.

    With k samples at a node, `beta(rho) = sum min(d, t / rho)` is the probability that one passes `min(1, t / (rho d))`, and rho
    the solution of `1 - (1 - beta)^k = rho beta` in [1, k]. The first sample that passes is accepted; if none does, the next
    token follows `t - min(d, t / rho) (1 - (1 - beta)^k) / beta`.

    Source: Sun et al. 2023, algorithm 3 and theorem 2.
    """
    target, draft = block.both_probs
    counts = (block.samples >= 0).sum(dim=1)
    # A single sample, in most rows, is tested against the target itself.
    rho, rows = torch.ones(len(counts), dtype=torch.float64, device=target.device), block.crowded
    rho[rows] = spectr_factor(target[rows], draft[rows], counts[rows])
    passing = torch.minimum(draft, target / rho[:, None].to(target.dtype))
    beta = passing.double().sum(dim=1)
    taken = 1 - (1 - beta).clamp_min(0) ** counts
    moves = torch.zeros(len(block.tokens), dtype=torch.float64, device=target.device)
    reach = torch.ones(len(target), dtype=torch.float64, device=target.device)
    for number in range(block.most_samples):
        there, node = block.samples[:, number] >= 0, block.samples[:, number].clamp_min(0)
        token = block.tokens[node][:, None]
        sampled_prob = draft.gather(1, token).squeeze(1).double()
        share = passing.gather(1, token).squeeze(1).double() / sampled_prob.clamp_min(torch.finfo(torch.float64).tiny)
        passes = torch.where(there & (sampled_prob > 0), share.clamp_max(1.0), 0.0)
        moves = moves.index_add(0, node, reach * passes)
        reach = reach * (1 - passes)
    scale = torch.where(beta > 0, taken / beta.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    return TreeDistribution(moves, (target - passing * scale[:, None].to(target.dtype)).clamp_min(0), block)


def spectr_factor(target: Tensor, draft: Tensor, counts: Tensor) -> Tensor:
    """Return rho (R,) float64 for distributions (R, V) and `counts` (R,) samples each.

    It is never below the solution, so the rule is lossless.
    """
    low = torch.ones(len(counts), dtype=torch.float64, device=target.device)
    high = counts.double().clamp_min(1)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        beta = torch.minimum(draft, target / middle[:, None].to(target.dtype)).double().sum(dim=1)
        enough = 1 - (1 - beta).clamp_min(0) ** counts <= middle * beta
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high


class SpecTr(TreeVerification):
    """`verification=spectr`: see `spectr_distribution`."""

    name = compile_key = "spectr"
    label = "SpecTr"
    takes = frozenset({IID})

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        return spectr_distribution(block)
