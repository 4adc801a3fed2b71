"""Token trees of the likeliest tokens (TSD): every node that is worth it gets its top-k children."""

from collections.abc import Sequence
from math import log
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.drafting.drafter import Drafting
from specheads.decoding.drafting.growth import ROOT, Drawn, Frontier, Grown, Nodes, TreeDrafter
from specheads.decoding.drafting.memory import DraftMemory
from specheads.decoding.engine import Engine
from specheads.decoding.records import Draft, DraftKind
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.stopping.rule import check_count, check_probability
from specheads.errors import UserError
from specheads.sampling import Uniforms, Warp


class Tree(Drafting):
    """`drafting=tree`: top-k children for every node that is not pruned, as deep as the stopping rule lets each path grow.

    A node has no children where the rule stops on its path (a head prunes by predicted survival), where its probability is below
    `theta_prob`, or below `theta_sib` times that of its likeliest sibling.

    Args:
        prune: `theta`, or `head`, which leaves pruning to a stopping rule with a head alone.
        top_k: children of a node.
        theta_prob, theta_sib: in [0, 1]; 0 prunes nothing.
        max_nodes: of a tree; those on the likeliest paths are taken.
        max_width: nodes of a level that get children, the likeliest.

    Source: GSD (Gong et al. 2024, section 3.1), whose baseline it is, with its defaults; SpecInfer (Miao et al. 2024).
    """

    kind = DraftKind.CHOSEN

    def __init__(
        self,
        top_k: int = 4,
        theta_prob: float = 0.2,
        theta_sib: float = 0.3,
        max_nodes: int = 64,
        max_width: int = 16,
        prune: str = "theta",
    ) -> None:
        if prune not in ("theta", "head"):
            raise UserError(f"drafting.prune={prune} is not known; use theta or head.")
        for name, value in (("top_k", top_k), ("max_nodes", max_nodes), ("max_width", max_width)):
            check_count(f"drafting.{name}", value, least=1)
        check_probability(
            "drafting.theta_prob", theta_prob, "the probability below which a node gets no children, for example 0.2"
        )
        check_probability("drafting.theta_sib", theta_sib, "a share of the likeliest sibling's probability, for example 0.3")
        self.prune, self.top_k = prune, top_k
        self.theta_prob, self.theta_sib = (theta_prob, theta_sib) if prune == "theta" else (0.0, 0.0)
        self.max_nodes, self.max_width = max_nodes, max_width

    def most_read(self, max_tokens: int) -> int:
        return self.max_nodes

    def most_verified(self, max_tokens: int) -> int:
        return self.max_nodes

    def drafter(self, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> "TopDrafter":
        """Return what drafts with these choices; raises UserError for prune=head without a head."""
        if self.prune == "head" and getattr(rule, "head", None) is None:
            raise UserError(
                f"drafting.prune=head leaves pruning to a head, but stopping by {type(rule).__name__} asks none; use for example "
                "stopping=[head_threshold], or drafting.prune=theta."
            )
        return self.make_drafter(engine, warp, rule)

    def make_drafter(self, engine: Engine, warp: Warp, rule: StoppingRule) -> "TopDrafter":
        return TopDrafter(self, engine, warp, rule)


class TopDrafter(TreeDrafter):
    """Drafts trees of the likeliest tokens."""

    def __init__(self, choices: Tree, engine: Engine, warp: Warp, rule: StoppingRule) -> None:
        super().__init__(engine, warp, rule, choices.max_nodes, min(choices.max_width, choices.max_nodes))
        self.choices = choices

    def draft(
        self, committed: Sequence[int], state: Any, limit: int, draws: Uniforms, ends: Tensor, num_probs_needed: int = 0
    ) -> Draft:
        """Return a tree behind the committed tokens, at most `limit` deep."""
        self._joint = {ROOT: 0.0}
        grown = self.grow(committed, state, limit, draws, ends)
        return self.finished(grown)

    def finished(self, grown: Grown) -> Draft:
        """Return the tree as it is verified."""
        return grown.nodes.draft(None, grown.num_draft_calls, nan=grown.nan)

    def propose(self, frontier: Frontier, draws: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        top = self.distribution(frontier.logits).topk(min(self.choices.top_k, self.engine.lm.vocab_size), dim=-1)
        rows = torch.arange(len(top.values), device=top.values.device)[:, None].expand_as(top.indices)
        return rows.flatten(), top.indices.flatten(), top.values.flatten().double()

    def admit(self, nodes: Nodes, drawn: Sequence[Drawn]) -> tuple[dict[int, Drawn], list[int]]:
        choices = self.choices
        joint = {one.number: self._joint[one.parent] + log(one.prob) for one in drawn if one.prob > 0}
        ranked = sorted((one for one in drawn if one.prob > 0), key=lambda one: -joint[one.number])
        largest: dict[int, float] = {}
        for one in ranked:
            largest[one.parent] = max(largest.get(one.parent, 0.0), one.prob)
        # In the order in which they were drawn, so that the first child is the likeliest.
        taken = sorted(ranked[: choices.max_nodes - len(nodes)], key=lambda one: one.number)
        admitted, onward = {}, []
        for one in taken:
            node = nodes.draw(one.parent, one.token)
            admitted[node], self._joint[node] = one, joint[one.number]
            small = one.prob < choices.theta_prob or one.prob < choices.theta_sib * largest[one.parent]
            if not (one.stop or small):
                onward.append(node)
        onward = sorted(onward, key=lambda node: -self._joint[node]) if len(nodes) < choices.max_nodes else []
        most_likely = self.without_repeats(nodes, onward, [node for node, one in admitted.items() if not one.stop])
        return admitted, sorted(most_likely)

    def without_repeats(self, nodes: Nodes, onward: Sequence[int], new: Sequence[int]) -> Sequence[int]:
        """Return the nodes that get children, of those that might, `onward`, the likeliest first; `new` are those that no rule stopped."""
        return onward[: self.choices.max_width]
