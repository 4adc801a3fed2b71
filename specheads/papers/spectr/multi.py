"""Several independently sampled chains: merged into a tree where they agree, or kept apart."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.arguments import check_count, check_flag
from specheads.decoding.engine import Engine
from specheads.decoding.step_inputs import DraftMemory
from specheads.decoding.stopping import StoppingRule
from specheads.pair.sampling import Uniforms, Warp, sample_distinct
from specheads.papers.trees.distribution import DISTINCT, IID, Draft
from specheads.papers.trees.growth import ROOT, Frontier, Nodes, Proposal, TreeDrafter, usual_length
from specheads.papers.trees.multi_round import MultiRound
from specheads.papers.trees.rounds import TreeDrafting


class Multi(TreeDrafting):
    """`drafting=multi`: `num_chains` i.i.d. chains, each as long as the stopping rule lets it grow.

    Args:
        num_chains: k.
        merge: whether chains share the nodes of a common prefix, so that all of them can continue where it is accepted. Without
            it verification follows the first accepted chain alone (`drafting=batch`, Yin et al. 2024).
        replacement: false samples the first tokens without replacement, so that no two chains begin with the same token.

    Source: SpecTr (Sun et al. 2023); SpecInfer (Miao et al. 2024) for the tree; RSD (Jeon et al. 2024) without replacement.
    """

    def __init__(self, num_chains: int = 4, merge: bool = True, replacement: bool = True) -> None:
        check_count("drafting.num_chains", num_chains, least=1)
        for name, value in (("merge", merge), ("replacement", replacement)):
            check_flag(f"drafting.{name}", value)
        self.num_chains, self.merge, self.replacement = num_chains, merge, replacement

    def most_read(self, max_tokens: int) -> int:
        return self.num_chains * max_tokens

    def most_verified(self, max_tokens: int) -> int:
        return self.num_chains * max_tokens

    @property
    def kind(self) -> str:
        return IID if self.replacement else DISTINCT

    def usual_verification(self) -> MultiRound:
        return MultiRound()

    def drafter(self, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> "_MultiDrafter":
        """Return the drafter for these choices."""
        return _MultiDrafter(self, engine, warp, rule, memory)


class _MultiDrafter(TreeDrafter):
    """Drafts i.i.d. chains side by side."""

    def __init__(self, choices: Multi, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> None:
        most = choices.most_read(usual_length(rule))
        super().__init__(engine, warp, rule, most, choices.num_chains)
        self.choices, self.distribution, self._probs = choices, warp, memory.distributions(most + 1)

    def draft(self, committed: Sequence[int], state: Any, limit: int, uniforms: Uniforms, ends: Tensor) -> Draft:
        """Return the chains after the committed tokens, at most `limit` long."""
        self._chains = [ROOT] * self.choices.num_chains  # the end of each that still grows
        grown = self.grow(committed, state, limit, uniforms, ends)
        distributions = self._probs[: len(grown.nodes) + 1]
        return grown.nodes.draft(distributions, grown.num_draft_calls, replacement=self.choices.replacement, nan=grown.nan)

    def propose(self, frontier: Frontier, uniforms: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        probs, device = self.distribution(frontier.logits), frontier.logits.device
        self._probs[torch.tensor(frontier.nodes, device=device) + 1] = probs
        place = {node: row for row, node in enumerate(frontier.nodes)}
        rows = torch.tensor([place[end] for end in self._chains], device=device)
        uniform = uniforms.take(self.choices.num_chains)[: len(rows)]
        if self.choices.replacement or frontier.nodes != [ROOT]:
            tokens = self.distribution.draw(probs[rows], uniform)
            return rows, tokens, probs[rows, tokens].double()
        tokens, first_probs = sample_distinct(probs[0], uniform)
        return rows, tokens, first_probs.double()

    def admit(self, nodes: Nodes, proposals: Sequence[Proposal]) -> tuple[dict[int, Proposal], list[int]]:
        admitted: dict[int, Proposal] = {}
        growing = []
        for proposal in proposals:
            if proposal.prob <= 0:
                continue  # there were fewer tokens than chains
            node = nodes.add(proposal.parent, proposal.token, self.choices.merge)
            admitted.setdefault(node, proposal)
            if not proposal.stop:
                growing.append(node)
        self._chains = growing
        return admitted, sorted(set(growing))
