"""Counts over drafts of several candidates, by hand and on small models."""

import pytest
import torch
from draftings import DRAFTINGS
from fakes import tiny_pair

from specheads import SpeculativeDecoder, papers, stopping
from specheads.decoding.records import DraftTree, Generation, Round
from specheads.papers.reproduction.draft_counts import DraftCounts, ngram_counts, rank_counts

#            context 7 8
#           /    |    \
#          1     2     8        nodes 0 1 2
#         / \    |     |
#        2   8   1     1        nodes 3 4 5 6
#        |
#        1                      node 7
TOKENS, PARENTS = (1, 2, 8, 2, 8, 1, 1, 1), (-1, -1, -1, 0, 0, 1, 2, 3)
CONTEXT = [7, 8]


def tree(path=(), num_drafted=8):
    return DraftTree(TOKENS, PARENTS, num_drafted, path)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, (8, 5)),  # 1 2 8, then 2 8 1 1 1 again
        # 81 82 88, 12 18 21 81 (again), 21 (again, below 1 and then 2)
        (2, (8, 2)),
        # 781 782 788, 812 818 821 881, 121: none occurs twice
        (3, (8, 0)),
    ],
)
def test_repeated_ngrams_are_counted_along_paths(n, expected):
    assert ngram_counts(tree(), CONTEXT, n) == expected


def test_copies_are_no_part_of_what_the_draft_wrote():
    assert ngram_counts(tree(num_drafted=5), CONTEXT, 1) == (5, 2)
    assert ngram_counts(tree(num_drafted=6), CONTEXT, 2) == (6, 0)


def test_ngrams_that_reach_before_the_text_do_not_count():
    assert ngram_counts(tree(), [8], 3) == (5, 0)
    assert ngram_counts(tree(), [], 2) == (5, 1)  # 12 18 21 81, 21 again


@pytest.mark.parametrize(
    ("path", "reached", "accepted"),
    [
        ((), [1, 1, 1, 0], [0, 0, 0, 0]),
        ((1, 5), [2, 1, 1, 0], [1, 1, 0, 0]),
        ((0, 4), [2, 2, 1, 0], [1, 1, 0, 0]),
        ((0, 3, 7), [3, 2, 1, 0], [3, 0, 0, 0]),
    ],
)
def test_children_are_counted_by_rank(path, reached, accepted):
    assert rank_counts(tree(path)) == (reached, accepted)


def test_all_later_children_are_counted_together():
    many = DraftTree(tuple(range(6)), (-1,) * 6, 6, (5,))
    assert rank_counts(many) == ([1, 1, 1, 3], [0, 0, 0, 1])


@pytest.mark.parametrize(("path", "rejection"), [((), True), ((0,), True), ((1,), True), ((1, 5), False), ((0, 3, 7), False)])
def test_a_round_has_a_rejection_if_tokens_were_drafted_after_the_accepted_ones(path, rejection):
    numbers = 8, len(path), 8 - len(path), 3, 0.1, 0.1, 0.1
    assert Round([0], *numbers, tree=tree(path)).has_rejection == rejection


def test_the_context_of_a_round_ends_with_the_round_before():
    """The second draft continues 5: its first node makes 51, which the first draft had as well, but not in the same draft."""
    chain = DraftTree((5, 1), (-1, 0), 2, ())
    other = DraftTree((1, 5, 1), (-1, 0, 1), 3, ())
    rounds = [Round([5], 2, 0, 2, 2, 0.1, 0.1, 0.1, tree=each) for each in (chain, other)]
    counts = DraftCounts.of(Generation(torch.tensor([9]), torch.tensor([5, 5]), "", rounds, None, "length"))
    assert counts.ngrams == [5, 5, 4] and counts.repeated == [1, 1, 0]  # 1 again; 51 15 51 again
    assert (counts.reached, counts.accepted, counts.num_graphs) == ([2, 0, 0, 0], [0, 0, 0, 0], 0)


@pytest.mark.parametrize("name", sorted(DRAFTINGS))
def test_trees_of_decoding_agree_with_its_totals(name):
    way = DRAFTINGS[name]
    out = SpeculativeDecoder(tiny_pair(5, window=128), way, stopping.FixedLength(3)).generate([1, 2, 1, 2], 20, seed=3)
    trees = [each.tree for each in out.rounds if each.tree is not None]
    if not trees:
        assert out.stats.num_rejections == sum(each.num_accepted < each.num_drafted for each in out.rounds)
        return
    assert len(trees) == len(out.rounds)
    assert sum(each.num_drafted for each in trees) == out.stats.num_drafted
    counts = DraftCounts.of(out)
    assert sum(counts.accepted) == out.stats.num_accepted and counts.ngrams[0] == out.stats.num_drafted
    assert out.stats.num_rejections <= len(out.rounds)


def test_unmerged_chains_repeat_what_a_tree_merges():
    def repeated(merge):
        way = papers.Multi(4, merge=merge)
        decoder = SpeculativeDecoder(tiny_pair(3, window=128), way, stopping.FixedLength(2), papers.MultiRound())
        counts = DraftCounts.of(decoder.generate([1, 2, 1], 30, seed=1))
        return counts.repeated[2] / counts.ngrams[2]

    assert repeated(False) > repeated(True)
