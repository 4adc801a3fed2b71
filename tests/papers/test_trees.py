"""Rules for trees: what comes out follows the target's distribution, by enumeration of all drafts
through the distributions that decoding samples from.
"""

from dataclasses import replace

import pytest
import torch
from chains import Model, Warped, difference
from trees import distributions_after, emitted, of_chains, trees_of

from specheads import Warp
from specheads.decoding.verification import Block, token_distribution
from specheads.papers import MultiRound, SpecTr, TreeMatch
from specheads.papers.gsd import unmerge
from specheads.papers.spectr import _spectr_factor
from specheads.papers.trees.verification import Draft, TreeBlock, TreeDistribution

RULES = {"tree_match": TreeMatch(), "multi_round": MultiRound(), "spectr": SpecTr()}


def drafted(tree, draft_probs=None):
    """Return a tree with the distributions that its nodes were sampled from."""
    return replace(tree, draft_probs=draft_probs)


def check(rule, target, draft, trees, length):
    actual = emitted(rule, target, draft, trees, length + 1)
    assert difference(actual, target) < 1e-9


@pytest.mark.parametrize(
    ("vocab_size", "count", "length"),
    [(2, 1, 3), (2, 2, 2), (2, 2, 3), (2, 3, 2), (3, 2, 2), (3, 4, 1), (2, 4, 2)],
)
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lacks", [False, True], ids=["whole", "lacks the last token"])
def test_iid_chains_are_lossless(lacks, rule, merge, vocab_size, count, length):
    for seed in (1, 2):
        target = Model(vocab_size, 2 * seed, seed % 2 == 1)
        draft = Model(vocab_size, 2 * seed + 1, seed % 4 > 1)
        draft = (
            Warped(Model(vocab_size, 2 * seed + 1), Warp(), range(vocab_size - 1))
            if lacks
            else draft
        )
        trees = list(trees_of(draft, count, length, merge))
        assert sum(prob for _, prob in trees) == pytest.approx(1)
        check(RULES[rule], target, draft, trees, length)


def test_ignoring_repeated_samples_would_be_noticed():
    """Merged duplicates that are tested once bias the distribution by a hundredth or more."""
    target = Model(3, 4)
    draft = Model(3, 5)
    trees = []
    for nodes, prob in trees_of(draft, 3, 1):
        nodes.order = sorted(set(nodes.order))
        trees.append((nodes, prob))
    assert difference(emitted(MultiRound(), target, draft, trees, 2), target) > 1e-2


def test_chosen_trees_are_lossless_under_matching():
    """Any tree, including siblings with equal tokens."""
    nodes = Draft()
    for parent, token in ((-1, 0), (-1, 1), (-1, 0), (0, 1), (0, 2), (2, 2), (3, 0), (1, 1)):
        nodes.add(parent, token)
    for seed in range(4):
        target = Model(3, seed, seed % 2 == 1)
        check(TreeMatch(), target, Model(3, 9), [(nodes, 1.0)], 3)


def test_copies_of_a_graph_are_lossless():
    """A graph whose nodes were linked by their last token, without copies."""
    graph = Draft()
    for parent, token in ((-1, 0), (-1, 1), (0, 1), (0, 2), (1, 0), (1, 2), (3, 0), (3, 1)):
        graph.add(parent, token)
    unmerge(graph, {2: 1, 4: 0, 5: 3, 6: 0, 7: 1}, depth=3, most=64)
    assert graph.num_copied > 5
    for seed in range(20):
        check(TreeMatch(), Model(3, seed, seed % 2 == 1), Model(3, 99), [(graph, 1.0)], 3)


@pytest.mark.parametrize("distribution_of", [MultiRound().distribution, SpecTr().distribution])
def test_a_single_chain_is_verified_like_token_verification(distribution_of):
    target = Model(4, 1)
    draft = Model(4, 2)
    nodes = of_chains([(1, 3, 0, 2)])
    target_probs = distributions_after(target, nodes)[0]
    draft_probs = distributions_after(draft, nodes)[0]
    distribution = distribution_of(TreeBlock.of(drafted(nodes, draft_probs), target_probs))
    plain = token_distribution(
        Block.of(torch.tensor([[1, 3, 0, 2]]), draft_probs[None, :4], target_probs[None])
    )
    torch.testing.assert_close(
        distribution.moves.cumprod(0), plain.survival[0].double(), atol=1e-12, rtol=0
    )
    for row in range(5):
        following = distribution.next_probs(torch.tensor([row]))[0]
        expected = plain.next_probs(torch.tensor([row]))[0]
        torch.testing.assert_close(
            following / following.sum(), expected / expected.sum(), atol=1e-12, rtol=0
        )


def test_the_factor_of_spectr_solves_its_equation():
    target, draft = (
        torch.stack([Model(5, seed + shift)(()) for seed in range(20)]) for shift in (0, 50)
    )
    for k in (1, 2, 4, 8):
        rho = _spectr_factor(target, draft, torch.full((20,), k))
        beta = torch.minimum(draft, target / rho[:, None]).sum(dim=1)
        torch.testing.assert_close(1 - (1 - beta) ** k, rho * beta, atol=1e-9, rtol=0)
        assert ((rho >= 1) & (rho <= k)).all()


def siblings(moves):
    """Return the distribution of a tree with two nodes at the context and one below the second."""
    nodes = Draft()
    for parent, token in ((-1, 0), (-1, 1), (1, 2)):
        nodes.add(parent, token)
    block = TreeBlock.of(
        drafted(nodes, torch.full((4, 3), 1 / 3)), torch.eye(3)[torch.tensor([0, 1, 2, 0])]
    )
    return TreeDistribution(torch.tensor(moves, dtype=torch.float64), block.target_probs, block)


def test_walks_move_where_a_uniform_number_falls():
    """From the context to the first node below 0.25, to the second below 0.75, and from there to
    the third below 0.5.
    """
    distribution = siblings([0.25, 0.5, 0.5])
    below = 2.0**-30
    for number, other, path, following in (
        (0.0, 0.0, [0, -1], 1),
        (0.25 - below, 0.9, [0, -1], 1),
        (0.25, 0.5, [1, -1], 2),
        (0.75 - below, 0.5 - below, [1, 2], 0),
        (0.75, 0.0, [-1, -1], 0),
    ):
        numbers = torch.tensor([number, other], dtype=torch.float64)
        nodes, next_token = distribution.decide(numbers, torch.tensor([0.5]))
        assert nodes.tolist() == path and next_token.tolist() == [following]


def test_an_empty_tree_gives_the_targets_token():
    block = TreeBlock.of(drafted(Draft(), torch.empty(1, 3)), torch.eye(3)[torch.tensor([2])])
    for rule in RULES.values():
        path, next_token = rule.distribution(block).decide(
            torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.5])
        )
        assert (path.tolist(), next_token.tolist()) == ([-1, -1], [2])


def test_trees_that_do_not_fit_their_rule_are_refused():
    nodes = of_chains([(0, 1), (0, 2)])
    with pytest.raises(
        ValueError, match="^3 nodes need 4 distributions of the target, but there are 3$"
    ):
        TreeBlock.of(drafted(nodes, torch.ones(4, 3)), torch.ones(3, 3))
    chosen = TreeBlock.of(drafted(nodes, None), torch.ones(4, 3))
    assert chosen.draft_probs is None and TreeMatch().distribution(chosen).moves.tolist() == [
        1,
        1,
        1,
    ]
    for rule in (MultiRound(), SpecTr()):
        with pytest.raises(
            ValueError,
            match=(
                "^the nodes were chosen, not sampled, so there are no distributions of the draft$"
            ),
        ):
            rule.distribution(chosen)


def test_a_chain_has_a_row_after_its_last_token_from_which_nothing_was_drafted():
    """A draft has a distribution for each of its tokens.

    The last row is that of tokens that could follow.
    """
    draft_probs = torch.rand(2, 3)
    target_probs = torch.rand(3, 3)
    block = TreeBlock.of(drafted(of_chains([(1, 2)]), draft_probs), target_probs)
    assert torch.equal(block.draft_probs, torch.cat([draft_probs, torch.zeros(1, 3)]))
    assert block.samples.tolist() == [[0], [1], [-1]] and block.samples.dtype == torch.long
    empty = TreeBlock.of(drafted(Draft(), torch.empty(1, 3)), torch.rand(1, 3))
    assert empty.samples.shape == (1, 0) and empty.samples.dtype == torch.long
    uneven = TreeBlock.of(of_chains([(0, 1), (0, 2), (1, 1)]), torch.rand(6, 3))
    assert uneven.samples.tolist() == [[0, 0, 1], [2, 3, -1], [4, -1, -1], *3 * [[-1, -1, -1]]]


@pytest.mark.parametrize("distribution_of", [MultiRound().distribution, SpecTr().distribution])
def test_what_is_left_keeps_the_type_of_the_distributions(distribution_of):
    nodes = of_chains([(0, 1), (0, 2), (1, 1)])
    target_probs, draft_probs = (
        distributions_after(Model(3, seed), nodes)[0].float() for seed in (7, 8)
    )
    distribution = distribution_of(TreeBlock.of(drafted(nodes, draft_probs), target_probs))
    wide = distribution_of(
        TreeBlock.of(drafted(nodes, draft_probs.double()), target_probs.double())
    )
    assert (
        distribution.rest.dtype == torch.float32
        and wide.rest.dtype == distribution.moves.dtype == torch.float64
    )
    torch.testing.assert_close(distribution.rest.double(), wide.rest, atol=1e-6, rtol=0)
    torch.testing.assert_close(distribution.moves, wide.moves, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_samples_follow_the_distribution(rule):
    """10,000 samples of one tree.

    A false alarm has a probability below 1e-6 per comparison (five standard errors).
    """
    target = Model(3, 7)
    draft = Model(3, 8)
    nodes = of_chains([(0, 1), (0, 2), (1, 1), (0, 1)])
    block = TreeBlock.of(
        drafted(nodes, distributions_after(draft, nodes)[0]), distributions_after(target, nodes)[0]
    )
    distribution = RULES[rule].distribution(block)
    number = 10_000
    uniform = torch.rand(number, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    paths = torch.stack([distribution.decide(u[:2], u[2:])[0] for u in uniform])
    ended = torch.bincount(paths.amax(dim=1) + 1, minlength=len(nodes.tokens) + 1)
    reach = [1.0]
    for move, parent in zip(distribution.moves.tolist(), nodes.parents, strict=True):
        reach.append(reach[parent + 1] * move)
    for row in range(len(nodes.tokens) + 1):
        children = [n for n, parent in enumerate(nodes.parents) if parent == row - 1]
        prob = reach[row] * (1 - distribution.moves[children].sum().item())
        share = ended[row].item() / number
        assert abs(share - prob) <= 5 * (prob * (1 - prob) / number) ** 0.5 + 1e-12
