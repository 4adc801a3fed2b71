"""Token graphs (GSD): where a draft repeats itself on another branch, the continuation is copied from there."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.arguments import check_count
from specheads.decoding.drafting.token_tree import TopDrafter, Tree
from specheads.decoding.drafting.tree_growth import Grown, Nodes
from specheads.decoding.engine import Engine
from specheads.decoding.records import Draft
from specheads.decoding.stopping import StoppingRule
from specheads.sampling import Uniforms, Warp


class Graph(Tree):
    """`drafting=graph`: a tree that is not extended at a node whose last `tau` tokens occur in the draft already.

    Before verification the continuation of their first occurrence is copied to the node, as deep as the draft may be, so that the
    target verifies it there too.

    Args:
        tau: tokens that must agree, including the last tokens of the context.
        max_verified: nodes that the target reads, including copies; shallow ones first.
        Others as in Tree.

    Source: Gong et al. 2024 (GSD), section 3.
    """

    def __init__(self, tau: int = 2, max_verified: int = 64, **choices: Any) -> None:
        super().__init__(**choices)
        check_count("drafting.tau", tau, least=1)
        check_count("drafting.max_verified", max_verified, least=self.max_nodes)
        self.tau, self.max_verified = tau, max_verified

    def most_verified(self, max_tokens: int) -> int:
        return self.max_verified

    def make_drafter(self, engine: Engine, warp: Warp, rule: StoppingRule) -> "GraphDrafter":
        return GraphDrafter(self, engine, warp, rule)


class GraphDrafter(TopDrafter):
    """Drafts graphs and expands them to trees."""

    choices: Graph

    def __init__(self, choices: Graph, engine: Engine, warp: Warp, rule: StoppingRule) -> None:
        self.most_pending = rule.max_tokens + 1  # the draft has not read accepted copies
        super().__init__(choices, engine, warp, rule)

    def draft(
        self, committed: Sequence[int], state: Any, limit: int, uniforms: Uniforms, ends: Tensor, num_probs_needed: int = 0
    ) -> Draft:
        self._first: dict[tuple[int, ...], int] = {}
        self._same: dict[int, int] = {}  # by merged node: the first node with the same run
        self._context = list(committed[-self.choices.tau :])
        self._deepest = min(limit, self.rule.max_tokens)
        return super().draft(committed, state, limit, uniforms, ends, num_probs_needed)

    def without_repeats(self, nodes: Nodes, onward: Sequence[int], new: Sequence[int]) -> Sequence[int]:
        """Return the nodes that get children: of those with the same run, the most likely one, from which the others copy."""
        taken: list[int] = []
        for node in onward:
            if len(taken) < self.choices.max_width and self._run(nodes, node) not in self._first:
                self._first[self._run(nodes, node)] = node
                taken.append(node)
        self._same |= {
            node: first for node in new if (first := self._first.get(self._run(nodes, node))) is not None and first != node
        }
        return taken

    def _run(self, nodes: Nodes, node: int) -> tuple[int, ...]:
        """Return the last `tau` tokens of a node's path."""
        return (*self._context, *(nodes.tokens[above] for above in nodes.path(node)))[-self.choices.tau :]

    def finished(self, grown: Grown) -> Draft:
        nodes, count = grown.nodes, len(grown.nodes)
        unmerge(nodes, self._same, self._deepest, self.choices.max_verified)
        copied = torch.arange(len(nodes)) >= count
        return nodes.draft(None, grown.num_draft_calls, copied=copied, nan=grown.nan)


def unmerge(nodes: Nodes, same: dict[int, int], depth: int, most: int) -> None:
    """Copy to every merged node the continuation of the node that it repeats, to `depth` levels and `most` nodes in all.

    Args:
        same: by merged node, the node that it repeats.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(nodes.parents):
        children.setdefault(parent, []).append(node)
    # Nodes with the drafted node that they repeat or are: whatever follows the latter also follows the former.
    todo = [(nodes.depth[node], node, first) for node, first in same.items()]
    heapify(todo)
    while todo:
        _, node, source = heappop(todo)
        if nodes.depth[node] + 1 >= depth:
            continue
        while source in same:
            source = same[source]
        for child in children.get(source, ()):
            if len(nodes) >= most:
                return
            copy = nodes.add(node, nodes.tokens[child])
            heappush(todo, (nodes.depth[copy], copy, child))
