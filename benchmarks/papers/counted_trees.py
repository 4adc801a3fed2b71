"""GSD's trees and graphs that count what their drafts repeat, through the door of drafting methods.

A drafter is given the nodes that were accepted (`keep`), and sees each level's distributions
(`propose`); both are public methods that a subclass extends.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import kl_div

from specheads.decoding.rounds import RoundParts
from specheads.pair.sampling import Uniforms
from specheads.papers.gsd import Graph, GraphDrafter, TopDrafter, Tree
from specheads.papers.trees.growth import Frontier
from specheads.papers.trees.verification import Draft


@dataclass(eq=False)
class CountedTree(Tree):
    """`Tree` with the counts of what its drafts had since they were last cleared.

    With `study`, runs of so many tokens that a draft repeats are counted, too.
    """

    study: int = 0
    counts: Counter = field(default_factory=Counter)

    def drafter(self, parts: RoundParts) -> TopDrafter:
        return _CountedTopDrafter(self, parts)


@dataclass(eq=False)
class CountedGraph(Graph, CountedTree):
    """`Graph` with the counts of `CountedTree`."""

    def drafter(self, parts: RoundParts) -> GraphDrafter:
        return _CountedGraphDrafter(self, parts)


class _CountedTopDrafter(TopDrafter):
    choices: CountedTree

    def begin(self, committed: Sequence[int], limit: int) -> None:
        super().begin(committed, limit)
        self._log_probs = dict[int, Tensor]()  # by node the distribution of its children

    def propose(self, frontier: Frontier, uniforms: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        if self.choices.study:
            log_probs = self.distribution(frontier.logits).double().log()
            self._log_probs.update(zip(frontier.nodes, log_probs, strict=True))
        return super().propose(frontier, uniforms)

    def keep(self, path: Sequence[int]) -> None:
        super().keep(path)
        tree = self.tree
        counts = self.choices.counts
        counts["full_drafts"] += tree.num_drafted >= self.choices.max_nodes
        counts["copy_rounds"] += any(node >= tree.num_drafted for node in path)
        for node in path:
            counts["later_children"] += tree.parents.index(tree.parents[node]) < node
        if self.choices.study:
            self._count_runs(tree)

    def _count_runs(self, tree: Draft) -> None:
        counts = self.choices.counts
        same = recurring(tree, self.choices.study)
        in_runs = set[int]()
        for node, first in same.items():
            in_runs.update(tree.path(node)[-self.choices.study :])
            if first < node and {node, first} <= self._log_probs.keys():
                used = self._log_probs[first]
                other = self._log_probs[node]
                counts["merges"] += 1
                counts["merge_nats"] += kl_div(used, other, reduction="sum", log_target=True).item()
        counts["in_runs"] += len(in_runs)


class _CountedGraphDrafter(_CountedTopDrafter, GraphDrafter):
    choices: CountedGraph


def recurring(tree: Draft, length: int) -> dict[int, int]:
    """Return the drafted nodes whose last `length` tokens another branch has, too.

    Each with the first such node there. Source: Gong et al. 2024, section 5.1 and figure 3.
    """
    paths = [tree.path(node) for node in range(tree.num_drafted)]
    ends = dict[tuple[int, ...], list[int]]()  # nodes by their last tokens
    for node, path in enumerate(paths):
        if len(path) >= length:
            run = tuple(tree.tokens[above] for above in path[-length:])
            ends.setdefault(run, []).append(node)
    found = {}
    for nodes in ends.values():
        for node in nodes:
            for other in nodes:
                if other not in paths[node] and node not in paths[other]:
                    found[node] = other
                    break
    return found
