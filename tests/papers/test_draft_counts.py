"""Counts over drafts of several candidates, by hand and on small models."""

import pytest
import torch
from draftings import DRAFTINGS
from fakes import tiny_pair

from specheads import SpeculativeDecoder, UserError, papers, stopping
from specheads.decoding.records import DraftTree, Generation, Round
from specheads.papers.reproduction.measures import draft_counts

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


def counted(*trees, prompt=CONTEXT):
    """Counts over rounds of these drafts, each of which emits 5."""
    rounds = [Round([5], 2, 0, 2, 2, 0.1, 0.1, 0.1, tree=each) for each in trees]
    return draft_counts(Generation(torch.tensor(prompt), torch.tensor([5] * len(trees)), "", rounds, None, "length"))


@pytest.mark.parametrize(("num_drafted", "expected"), [(8, (8, 2)), (6, (6, 0))])  # copies are no part of what was drafted
def test_repeated_bigrams_are_counted_along_paths(num_drafted, expected):
    """81 82 88, 12 18 21 81 (again), 21 (again, below 1 and then 2)."""
    counts = counted(tree(num_drafted=num_drafted))
    assert (counts["bigrams"], counts["bigrams_repeated"]) == expected


@pytest.mark.parametrize(
    ("path", "reached", "accepted"),
    [
        ((), [1, 1], [0, 0]),
        ((1, 5), [2, 1], [1, 1]),
        ((0, 4), [2, 2], [1, 1]),
        ((0, 3, 7), [3, 2], [3, 0]),
    ],
)
def test_children_are_counted_by_rank(path, reached, accepted):
    counts = counted(tree(path))
    assert [counts[f"{rank}_reached"] for rank in ("first", "second")] == reached
    assert [counts[f"{rank}_accepted"] for rank in ("first", "second")] == accepted


@pytest.mark.parametrize(("path", "rejection"), [((), True), ((0,), True), ((1,), True), ((1, 5), False), ((0, 3, 7), False)])
def test_a_round_has_a_rejection_if_tokens_were_drafted_after_the_accepted_ones(path, rejection):
    numbers = 8, len(path), 8 - len(path), 3, 0.1, 0.1, 0.1
    assert Round([0], *numbers, tree=tree(path)).has_rejection == rejection


def test_the_context_of_a_round_ends_with_the_round_before():
    """The second draft continues 5: its first node makes 51, which the first draft had as well, but not in the same draft."""
    chain = DraftTree((5, 1), (-1, 0), 2, ())
    other = DraftTree((1, 5, 1), (-1, 0, 1), 3, ())
    counts = counted(chain, other, prompt=[9])
    assert counts["bigrams"] == 5 and counts["bigrams_repeated"] == 1  # 51 15 51 again
    assert counts["first_reached"] == 2 and not counts["first_accepted"]


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
    counts = draft_counts(out)
    assert counts["first_accepted"] + counts["second_accepted"] <= out.stats.num_accepted
    assert counts["bigrams"] == out.stats.num_drafted
    assert out.stats.num_rejections <= len(out.rounds)


def test_unmerged_chains_repeat_what_a_tree_merges():
    def repeated(merge):
        way = papers.Multi(4, merge=merge)
        decoder = SpeculativeDecoder(tiny_pair(3, window=128), way, stopping.FixedLength(2), papers.MultiRound())
        counts = draft_counts(decoder.generate([1, 2, 1], 30, seed=1))
        return counts["bigrams_repeated"] / counts["bigrams"]

    assert repeated(False) > repeated(True)


def test_several_drafts_are_four_that_share_what_they_have_in_common():
    assert vars(papers.Multi()) == {"num_chains": 4, "merge": True}
    with pytest.raises(UserError, match="^drafting.num_chains=0 must"):
        papers.Multi(0)
    with pytest.raises(UserError, match="^drafting.merge=1 must"):
        papers.Multi(merge=1)
