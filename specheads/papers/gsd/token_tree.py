"""Token trees of the most likely tokens (TSD): every node that is not pruned gets its top-k children."""

from collections.abc import Sequence
from math import log
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.arguments import check_choice, check_count, check_probability
from specheads.decoding.draft_memory import DraftMemory
from specheads.decoding.engine import Engine
from specheads.decoding.records import Draft
from specheads.decoding.stopping import StoppingRule
from specheads.errors import UserError
from specheads.papers.trees.growth import ROOT, Frontier, Grown, Nodes, Proposal, TreeDrafter
from specheads.papers.trees.rounds import TreeDrafting
from specheads.papers.trees.tree_match import TreeMatch
from specheads.papers.trees.verifier import CHOSEN
from specheads.sampling import Uniforms, Warp


class Tree(TreeDrafting):
    """`drafting=tree`: top-k children for every node that is not pruned, as deep as the stopping rule lets each path grow.

    A node has no children where the rule stops on its path (a head prunes by predicted survival), where its probability is below
    `theta_prob`, or below `theta_sib` times that of its most likely sibling.

    Args:
        prune: `theta`, or `head`, which leaves pruning to a stopping rule with a head alone.
        top_k: children of a node.
        theta_prob, theta_sib: in [0, 1]; 0 prunes nothing.
        max_nodes: of a tree; those on the most likely paths are taken.
        max_width: nodes of a level that get children, the most likely ones.

    Source: the baseline of GSD (Gong et al. 2024, section 3.1), with its defaults; SpecInfer (Miao et al. 2024).
    """

    kind = CHOSEN

    def __init__(
        self,
        top_k: int = 4,
        theta_prob: float = 0.2,
        theta_sib: float = 0.3,
        max_nodes: int = 64,
        max_width: int = 16,
        prune: str = "theta",
    ) -> None:
        check_choice("drafting.prune", prune, ("theta", "head"))
        for name, value in (("top_k", top_k), ("max_nodes", max_nodes), ("max_width", max_width)):
            check_count(f"drafting.{name}", value, least=1)
        check_probability(
            "drafting.theta_prob", theta_prob, "the probability below which a node gets no children, for example 0.2"
        )
        check_probability("drafting.theta_sib", theta_sib, "a share of the most likely sibling's probability, for example 0.3")
        self.prune, self.top_k = prune, top_k
        self.theta_prob, self.theta_sib = (theta_prob, theta_sib) if prune == "theta" else (0.0, 0.0)
        self.max_nodes, self.max_width = max_nodes, max_width

    def most_read(self, max_tokens: int) -> int:
        return self.max_nodes

    def most_verified(self, max_tokens: int) -> int:
        return self.max_nodes

    def usual_verification(self) -> TreeMatch:
        return TreeMatch()

    def drafter(self, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> "TopDrafter":
        """Return the drafter for these choices; raises UserError for prune=head without a head."""
        if self.prune == "head" and not rule.uses_head:
            raise UserError(
                f"drafting.prune=head leaves pruning to a head, but stopping by {type(rule).__name__} has none; use for example "
                "stopping=[head_threshold], or drafting.prune=theta."
            )
        return self.make_drafter(engine, warp, rule)

    def make_drafter(self, engine: Engine, warp: Warp, rule: StoppingRule) -> "TopDrafter":
        """Return the drafter for these choices, which were checked."""
        return TopDrafter(self, engine, warp, rule)


class TopDrafter(TreeDrafter):
    """Drafts trees of the most likely tokens."""

    def __init__(self, choices: Tree, engine: Engine, warp: Warp, rule: StoppingRule) -> None:
        super().__init__(engine, warp, rule, choices.max_nodes, min(choices.max_width, choices.max_nodes))
        self.choices = choices

    def draft(self, committed: Sequence[int], state: Any, limit: int, uniforms: Uniforms, ends: Tensor) -> Draft:
        """Return a tree after the committed tokens, at most `limit` deep."""
        self._joint = {ROOT: 0.0}
        grown = self.grow(committed, state, limit, uniforms, ends)
        return self.finished(grown)

    def finished(self, grown: Grown) -> Draft:
        """Return the tree as it is verified."""
        return grown.nodes.draft(None, grown.num_draft_calls, nan=grown.nan)

    def propose(self, frontier: Frontier, uniforms: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        top = self.distribution(frontier.logits).topk(min(self.choices.top_k, self.engine.lm.vocab_size), dim=-1)
        rows = torch.arange(len(top.values), device=top.values.device)[:, None].expand_as(top.indices)
        return rows.flatten(), top.indices.flatten(), top.values.flatten().double()

    def admit(self, nodes: Nodes, proposals: Sequence[Proposal]) -> tuple[dict[int, Proposal], list[int]]:
        choices = self.choices
        possible = [proposal for proposal in proposals if proposal.prob > 0]
        joint = {proposal.number: self._joint[proposal.parent] + log(proposal.prob) for proposal in possible}
        ranked = sorted(possible, key=lambda proposal: -joint[proposal.number])
        largest: dict[int, float] = {}
        for proposal in ranked:
            largest[proposal.parent] = max(largest.get(proposal.parent, 0.0), proposal.prob)
        # In the order in which they were proposed, so that the first child is the most likely.
        taken = sorted(ranked[: choices.max_nodes - len(nodes)], key=lambda proposal: proposal.number)
        admitted, onward = {}, []
        for proposal in taken:
            node = nodes.add(proposal.parent, proposal.token)
            admitted[node], self._joint[node] = proposal, joint[proposal.number]
            small = proposal.prob < choices.theta_prob or proposal.prob < choices.theta_sib * largest[proposal.parent]
            if not (proposal.stop or small):
                onward.append(node)
        onward = sorted(onward, key=lambda node: -self._joint[node]) if len(nodes) < choices.max_nodes else []
        parents = self.without_repeats(nodes, onward, [node for node, proposal in admitted.items() if not proposal.stop])
        return admitted, sorted(parents)

    def without_repeats(self, nodes: Nodes, onward: Sequence[int], new: Sequence[int]) -> Sequence[int]:
        """Return the nodes that get children.

        Args:
            onward: the nodes that may get children, the most likely first.
            new: the level's nodes at which no rule stopped.
        """
        return onward[: self.choices.max_width]
