"""Drafts of several candidates in numbers: which children are accepted, and how often drafts repeat themselves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specheads.decoding.records import DraftTree, Generation

NUM_RANKS = 4  # the last counts all later children, too
LONGEST_NGRAM = 3


@dataclass(frozen=True)
class DraftCounts:
    """Counts over the drafts of some responses, by the rank of a node among its siblings, the first 0, or by n from 1.

    Siblings are in the order in which they were drafted: of chosen tokens the most likely first, of samples the first sampled.
    """

    reached: Sequence[int] = (0,) * NUM_RANKS  # children of the context and of accepted nodes
    accepted: Sequence[int] = (0,) * NUM_RANKS
    ngrams: Sequence[int] = (0,) * LONGEST_NGRAM  # those that end at a drafted node, with the tokens before it on its path
    repeated: Sequence[int] = (0,) * LONGEST_NGRAM  # those that end at an earlier node of the same draft, too
    num_graphs: int = 0  # drafts in which repeated continuations are copied

    @classmethod
    def of(cls, generation: Generation) -> "DraftCounts":
        """Count the drafts of a response."""
        context, parts = generation.prompt_ids[-LONGEST_NGRAM:].tolist(), []
        for each in generation.rounds:
            if each.tree is not None:
                reached, accepted = rank_counts(each.tree)
                sizes = range(1, LONGEST_NGRAM + 1)
                ngrams, repeated = zip(*(ngram_counts(each.tree, context, n) for n in sizes), strict=True)
                parts.append(cls(reached, accepted, ngrams, repeated, int(each.tree.is_graph)))
            context = [*context, *each.tokens][-LONGEST_NGRAM:]
        return cls.total(parts)

    @classmethod
    def total(cls, parts: Iterable["DraftCounts"]) -> "DraftCounts":
        """Add up several counts."""
        every = [cls(), *parts]
        return cls(*(np.sum([getattr(part, name) for part in every], axis=0).tolist() for name in cls.__dataclass_fields__))


def rank_counts(tree: DraftTree) -> tuple[list[int], list[int]]:
    """Return by rank how many children verification reached, and how many of them it accepted."""
    reached, accepted = [0] * NUM_RANKS, [0] * NUM_RANKS
    path = set(tree.path)
    ranks: dict[int, int] = {parent: 0 for parent in (-1, *tree.path)}
    for node, parent in enumerate(tree.parents):
        if parent in ranks:
            rank = min(ranks[parent], NUM_RANKS - 1)
            ranks[parent] += 1
            reached[rank] += 1
            accepted[rank] += node in path
    return reached, accepted


def ngram_counts(tree: DraftTree, context: Sequence[int], n: int) -> tuple[int, int]:
    """Return how many n-grams end at a node that the draft proposed, and how many of them at an earlier such node, too.

    N-grams reach back along a node's path, into the context where that is shorter. With n = tau the repeated ones are those that
    a token graph merges (Gong et al. 2024, GSD, section 3).
    """
    before = tuple(context[max(0, len(context) - n + 1) :])
    ends: dict[int, tuple[int, ...]] = {-1: before}  # by node, the last n - 1 tokens after it
    seen: set[tuple[int, ...]] = set()
    count = repeated = 0
    for node in range(tree.num_drafted):
        ngram = (*ends[tree.parents[node]], tree.tokens[node])
        ends[node] = ngram[1:] if len(ngram) == n else ngram  # shorter where the context is
        count += len(ngram) == n
        repeated += len(ngram) == n and ngram in seen
        seen.add(ngram)
    return count, repeated
