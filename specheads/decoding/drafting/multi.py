"""Several chains that are drawn independently: merged into a tree where they agree, or side by side."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.drafting.drafter import Drafting
from specheads.decoding.drafting.growth import ROOT, Drawn, Frontier, Nodes, TreeDrafter, usual_length
from specheads.decoding.drafting.memory import DraftMemory
from specheads.decoding.engine import Engine
from specheads.decoding.records import Draft, DraftKind
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.stopping.rule import check_count
from specheads.errors import UserError
from specheads.sampling import Uniforms, Warp


class Multi(Drafting):
    """`drafting=multi`: `num_chains` i.i.d. chains, each as long as the stopping rule lets it grow.

    Args:
        num_chains: k.
        merge: whether chains share the nodes of what they begin with, so that each goes on wherever one of them is accepted. Without it
            verification follows the first accepted chain alone (`drafting=batch`, Yin et al. 2024).
        replacement: false draws the first tokens without replacement, so that no two chains begin alike.

    Source: SpecTr (Sun et al. 2023); SpecInfer (Miao et al. 2024) for the tree; RSD (Jeon et al. 2024) without replacement.
    """

    def __init__(self, num_chains: int = 4, merge: bool = True, replacement: bool = True) -> None:
        check_count("drafting.num_chains", num_chains, least=1)
        for name, value in (("merge", merge), ("replacement", replacement)):
            if not isinstance(value, bool):
                raise UserError(f"drafting.{name}={value} is neither true nor false.")
        self.num_chains, self.merge, self.replacement = num_chains, merge, replacement

    def most_read(self, max_tokens: int) -> int:
        return self.num_chains * max_tokens

    def most_verified(self, max_tokens: int) -> int:
        return self.num_chains * max_tokens

    @property
    def kind(self) -> DraftKind:
        return DraftKind.IID if self.replacement else DraftKind.DISTINCT

    def drafter(self, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> "MultiDrafter":
        """Return what drafts with these choices."""
        return MultiDrafter(self, engine, warp, rule, memory)


class MultiDrafter(TreeDrafter):
    """Drafts i.i.d. chains side by side."""

    def __init__(self, choices: Multi, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> None:
        most = choices.most_read(usual_length(rule))
        super().__init__(engine, warp, rule, most, choices.num_chains)
        self.choices, self.distribution, self._probs = choices, warp, memory.distributions(most + 1)

    def draft(
        self, committed: Sequence[int], state: Any, limit: int, draws: Uniforms, ends: Tensor, num_probs_needed: int = 0
    ) -> Draft:
        """Return the chains behind the committed tokens, at most `limit` long."""
        self._chains = [ROOT] * self.choices.num_chains  # the end of each that still grows
        grown = self.grow(committed, state, limit, draws, ends)
        distributions = self._probs[: len(grown.nodes) + 1]
        return grown.nodes.draft(distributions, grown.num_draft_calls, replacement=self.choices.replacement, nan=grown.nan)

    def propose(self, frontier: Frontier, draws: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        distribution, device = self.distribution(frontier.logits), frontier.logits.device
        self._probs[torch.tensor(frontier.nodes, device=device) + 1] = distribution
        place = {node: row for row, node in enumerate(frontier.nodes)}
        rows = torch.tensor([place[end] for end in self._chains], device=device)
        uniform = draws.take(self.choices.num_chains)[: len(rows)]
        if self.choices.replacement or frontier.nodes != [ROOT]:
            tokens = self.distribution.draw(distribution[rows], uniform)
            return rows, tokens, distribution[rows, tokens].double()
        tokens, probs, left = [], [], distribution.clone()  # each from what the ones before it leave
        for number in range(len(rows)):
            token = self.distribution.draw(left, uniform[number : number + 1])
            tokens.append(token)
            probs.append(left.gather(1, token[:, None])[:, 0])
            left = left.scatter(1, token[:, None], 0.0)
        return rows, torch.cat(tokens), torch.cat(probs).double()

    def admit(self, nodes: Nodes, drawn: Sequence[Drawn]) -> tuple[dict[int, Drawn], list[int]]:
        admitted: dict[int, Drawn] = {}
        growing = []
        for one in drawn:
            if one.prob <= 0:
                continue  # there were fewer tokens than chains
            node = nodes.draw(one.parent, one.token, self.choices.merge)
            admitted.setdefault(node, one)
            if not one.stop:
                growing.append(node)
        self._chains = growing
        return admitted, sorted(set(growing))
