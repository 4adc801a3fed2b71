"""GSD (Gong et al. 2024): trees of the most likely tokens (TSD), and graphs that copy what a draft
repeats.

In a tree every node that is not pruned gets its top-k children. In a graph, where a draft repeats
itself on another branch, the continuation is copied from there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import log
from typing import Annotated

import torch
from torch import Tensor

from specheads.decoding.rounds import RoundParts
from specheads.pair.sampling import Uniforms
from specheads.papers.trees.growth import Frontier, Proposal, TreeDrafter, TreeDrafting
from specheads.papers.trees.verification import CHOSEN, ROOT, Draft
from specheads.settings import PositiveCount, Probability, argument, check, count


@dataclass(eq=False)
class Tree(TreeDrafting):
    """`drafting=tree`: top-k children for every node that is not pruned, as deep as the stopping
    rule lets each path grow.

    A node has no children where the rule stops on its path (a head prunes by predicted survival),
    where its probability is below `theta_prob`, or below `theta_sib` times that of its most likely
    sibling.

    Source: the baseline of GSD (Gong et al. 2024, section 4), with its defaults; SpecInfer (Miao et
    al. 2024).
    """

    kind = CHOSEN
    top_k: PositiveCount = argument(4, "the number of a node's children")
    theta_prob: Probability = argument(
        0.2, "the probability below which a node gets no children, for example 0.2; 0: none"
    )
    theta_sib: Probability = argument(
        0.3, "a share of the most likely sibling's probability, for example 0.3; 0: none"
    )
    max_nodes: PositiveCount = argument(
        64, "the most nodes of a tree; those on the most likely paths are taken"
    )
    max_width: PositiveCount = argument(
        16, "the most nodes of a level that get children, the most likely ones"
    )

    def most_read(self, max_tokens: int) -> int:
        return self.max_nodes

    def drafter(self, parts: RoundParts) -> "TopDrafter":
        return TopDrafter(self, parts)


class TopDrafter(TreeDrafter):
    """Drafts the trees of `Tree`."""

    def __init__(self, choices: Tree, parts: RoundParts) -> None:
        super().__init__(parts, choices.max_nodes)
        self.choices = choices

    def begin(self, committed: Sequence[int], limit: int) -> None:
        self._joint = {ROOT: 0.0}

    def propose(self, frontier: Frontier, uniforms: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        probs = self.distribution(frontier.logits)
        top = probs.topk(min(self.choices.top_k, self.engine.lm.vocab_size), dim=-1)
        rows = torch.arange(len(top.values), device=top.values.device)[:, None].expand_as(
            top.indices
        )
        return rows.flatten(), top.indices.flatten(), top.values.flatten().double()

    def admit(self, proposals: Sequence[Proposal]) -> tuple[dict[int, Proposal], list[int]]:
        choices = self.choices
        tree = self.tree
        possible = [proposal for proposal in proposals if proposal.prob > 0]
        joint = {
            proposal.number: self._joint[proposal.parent] + log(proposal.prob)
            for proposal in possible
        }
        ranked = sorted(possible, key=lambda proposal: -joint[proposal.number])
        largest: dict[int, float] = {}
        for proposal in ranked:
            largest[proposal.parent] = max(largest.get(proposal.parent, 0.0), proposal.prob)
        # In the order in which they were proposed, so that the first child is the most likely.
        taken = sorted(
            ranked[: choices.max_nodes - len(tree)], key=lambda proposal: proposal.number
        )
        admitted = {}
        onward = []
        for proposal in taken:
            node = tree.add(proposal.parent, proposal.token)
            admitted[node] = proposal
            self._joint[node] = joint[proposal.number]
            small = (
                proposal.prob < choices.theta_prob
                or proposal.prob < choices.theta_sib * largest[proposal.parent]
            )
            if not (proposal.stop or small):
                onward.append(node)
        onward = (
            sorted(onward, key=lambda node: -self._joint[node])
            if len(tree) < choices.max_nodes
            else []
        )
        parents = self.without_repeats(
            onward, [node for node, proposal in admitted.items() if not proposal.stop]
        )
        return admitted, sorted(parents)

    def without_repeats(self, onward: Sequence[int], new: Sequence[int]) -> Sequence[int]:
        """Return which of the nodes `onward`, the most likely first, get children.

        No rule stopped at the level's nodes `new`.
        """
        return onward[: self.choices.max_width]


@dataclass(eq=False)
class Graph(Tree):
    """`drafting=graph`: a tree that is not extended at a node whose last `tau` tokens occur in the
    draft already.

    Before verification the continuation of an earlier occurrence is copied to the node, as deep as
    the draft may be, so that the target verifies it there too.

    Source: Gong et al. 2024 (GSD), section 5. Their code (github.com/gzhch/gsd) copies
    continuations, too; it links to the first occurrence outside the node's path, where here that of
    a level is its most likely node, and also to a node that has no continuation.
    """

    tau: PositiveCount = argument(
        2, "the number of tokens that must agree, including the last tokens of the context"
    )
    max_verified: PositiveCount = argument(
        64, "the most nodes that the target reads, including copies; shallow ones first"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check("drafting.max_verified", self.max_verified, Annotated[int, count(self.max_nodes)])

    def most_verified(self, max_tokens: int) -> int:
        return self.max_verified

    def drafter(self, parts: RoundParts) -> "GraphDrafter":
        return GraphDrafter(self, parts)


class GraphDrafter(TopDrafter):
    """Drafts the graphs of `Graph`."""

    choices: Graph

    def __init__(self, choices: Graph, parts: RoundParts) -> None:
        self.most_pending = parts.stopping.max_tokens + 1  # the draft has not read accepted copies
        super().__init__(choices, parts)

    def begin(self, committed: Sequence[int], limit: int) -> None:
        super().begin(committed, limit)
        self._occurrences: dict[
            tuple[int, ...], int
        ] = {}  # the node of each run that gets children
        self._same: dict[
            int, int
        ] = {}  # for each merged node the node with the same run that it is linked to
        self._context = list(committed[-self.choices.tau :])
        self._deepest = limit

    def without_repeats(self, onward: Sequence[int], new: Sequence[int]) -> Sequence[int]:
        """Return the nodes that get children: of those with the same run a single one, from which
        the others copy.
        """
        new_runs: dict[tuple[int, ...], int] = {}
        for node in onward:
            if (run := self._run(node)) not in self._occurrences:
                new_runs.setdefault(run, node)
        taken = list(new_runs.values())[: self.choices.max_width]
        self._occurrences |= {self._run(node): node for node in taken}
        for node in new:
            if node not in taken and (run := self._run(node)) in self._occurrences:
                self._same[node] = self._occurrences[run]
        return taken

    def _run(self, node: int) -> tuple[int, ...]:
        return (*self._context, *(self.tree.tokens[above] for above in self.tree.path(node)))[
            -self.choices.tau :
        ]

    def finish(self) -> Draft:
        unmerge(self.tree, self._same, self._deepest, self.choices.max_verified)
        return self.tree


def unmerge(tree: Draft, same: Mapping[int, int], depth: int, most: int) -> None:
    """Copy to every merged node the continuation of the node that it repeats (`same`), to `depth`
    levels and `most` nodes.
    """
    num_drafted = len(tree)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    # By node the drafted node that it repeats or is: whatever follows the latter also follows the
    # former.
    repeated = [same.get(node, node) for node in range(num_drafted)]
    todo = [(tree.depth[node], node) for node in same]
    heapify(todo)
    while todo:
        _, node = heappop(todo)
        for child in children.get(repeated[node], ()) if tree.depth[node] + 1 < depth else ():
            if len(tree) >= most:
                break
            copy = tree.add(node, tree.tokens[child])
            repeated.append(repeated[child])
            heappush(todo, (tree.depth[copy], copy))
    tree.num_copied = len(tree) - num_drafted
