"""SpecTr (Sun et al. 2023): several independently sampled chains, and k-sequential selection of one
of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.rounds import RoundParts
from specheads.pair.sampling import Uniforms
from specheads.papers.trees.growth import (
    Frontier,
    Proposal,
    TreeDrafter,
    TreeDrafting,
    usual_length,
)
from specheads.papers.trees.verification import (
    IID,
    ROOT,
    Draft,
    MultiRound,
    TreeBlock,
    TreeDistribution,
    TreeVerification,
)
from specheads.settings import Flag, PositiveCount, argument


@dataclass(eq=False)
class Multi(TreeDrafting):
    """`drafting=multi`: `num_chains` i.i.d. chains, each as long as the stopping rule lets it grow.

    Without `merge` verification follows the first accepted chain alone (`drafting=batch`, Yin et
    al. 2024). Source: SpecTr (Sun et al. 2023); SpecInfer (Miao et al. 2024) for the tree.
    """

    kind = IID
    num_chains: PositiveCount = argument(4, "k, the number of chains")
    merge: Flag = argument(
        True,
        "whether chains share the nodes of a common prefix, so that all continue where it is"
        " accepted",
    )

    def most_read(self, max_tokens: int) -> int:
        return self.num_chains * max_tokens

    def usual_verification(self) -> MultiRound:
        return MultiRound()

    def drafter(self, parts: RoundParts) -> "_MultiDrafter":
        return _MultiDrafter(self, parts)


class _MultiDrafter(TreeDrafter):
    def __init__(self, choices: Multi, parts: RoundParts) -> None:
        most = choices.most_read(usual_length(parts.stopping))
        super().__init__(parts, most)
        self.choices = choices
        self.distribution = parts.warp
        self._probs = parts.memory.distributions(most + 1)

    def begin(self, committed: Sequence[int], limit: int) -> None:
        self._chains = [ROOT] * self.choices.num_chains  # the end of each that still grows

    def finish(self) -> Draft:
        self.tree.draft_probs = self._probs[: len(self.tree) + 1]
        return self.tree

    def propose(self, frontier: Frontier, uniforms: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        probs = self.distribution(frontier.logits)
        device = frontier.logits.device
        self._probs[torch.tensor(frontier.nodes, device=device) + 1] = probs
        place = {node: row for row, node in enumerate(frontier.nodes)}
        rows = torch.tensor([place[end] for end in self._chains], device=device)
        tokens = self.distribution.draw(
            probs[rows], uniforms.take(self.choices.num_chains)[: len(rows)]
        )
        return rows, tokens, probs[rows, tokens].double()

    def admit(self, proposals: Sequence[Proposal]) -> tuple[dict[int, Proposal], list[int]]:
        admitted: dict[int, Proposal] = {}
        self._chains = []
        for proposal in proposals:
            node = self.tree.add(proposal.parent, proposal.token, self.choices.merge)
            admitted.setdefault(node, proposal)
            self._chains += [] if proposal.stop else [node]
        return admitted, sorted(set(self._chains))


_NUM_HALVINGS = 40  # the interval has length k - 1; the remaining error only lowers the acceptance


class SpecTr(TreeVerification):
    """`verification=spectr`: all samples at a node are tested against one distribution, the
    target's lowered by rho.

    With k samples at a node, `beta(rho) = sum min(d, t / rho)` is the probability that one passes
    `min(1, t / (rho d))`, and rho the solution of `1 - (1 - beta)^k = rho beta` in [1, k]. The
    first sample that passes is accepted; if none does, the next token follows `t - min(d, t / rho)
    (1 - (1 - beta)^k) / beta`.

    Source: Sun et al. 2023, algorithm 3 and theorem 2.
    """

    name = compile_key = "spectr"
    label = "SpecTr"
    takes = frozenset({IID})

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        target, draft = block.both_probs
        counts = (block.samples >= 0).sum(dim=1)
        # A single sample, in most rows, is tested against the target itself.
        rho = torch.ones(len(counts), dtype=torch.float64, device=target.device)
        rows = block.crowded
        rho[rows] = _spectr_factor(target[rows], draft[rows], counts[rows])
        passing = torch.minimum(draft, target / rho[:, None].to(target.dtype))
        beta = passing.double().sum(dim=1)
        taken = 1 - (1 - beta).clamp_min(0) ** counts
        there = block.samples >= 0
        node = block.samples.clamp_min(0)
        token = block.tokens[node]
        sampled_prob = draft.gather(1, token).double()
        share = passing.gather(1, token).double() / sampled_prob.clamp_min(
            torch.finfo(torch.float64).tiny
        )
        passes = torch.where(there & (sampled_prob > 0), share.clamp_max(1.0), 0.0)
        # All before were rejected
        reach = torch.nn.functional.pad((1 - passes).cumprod(dim=1), (1, 0), value=1.0)[:, :-1]
        moves = torch.zeros(len(block.tokens), dtype=torch.float64, device=target.device)
        moves = moves.index_add(0, node.flatten(), (reach * passes).flatten())
        scale = torch.where(beta > 0, taken / beta.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
        return TreeDistribution(
            moves, (target - passing * scale[:, None].to(target.dtype)).clamp_min(0), block
        )


def _spectr_factor(target: Tensor, draft: Tensor, counts: Tensor) -> Tensor:
    """Return rho (R,) float64 for distributions (R, V) and `counts` (R,) samples each.

    It is never below the solution, so the rule is lossless.
    """
    low = torch.ones(len(counts), dtype=torch.float64, device=target.device)
    high = counts.double().clamp_min(1)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        beta = torch.minimum(draft, target / middle[:, None].to(target.dtype)).double().sum(dim=1)
        enough = 1 - (1 - beta).clamp_min(0) ** counts <= middle * beta
        low = torch.where(enough, low, middle)
        high = torch.where(enough, middle, high)
    return high
