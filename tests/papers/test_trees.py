"""Rules for trees: what comes out follows the target's distribution, by enumeration of all drafts through the distributions that
decoding samples from.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from chains import Model, difference
from trees import distributions_after, emitted, of_chains, trees_of

from specheads.decoding.verification import token_distribution
from specheads.decoding.verification.rule import Block
from specheads.papers import MultiRound, SpecTr, TreeMatch
from specheads.papers.gsd import unmerge
from specheads.papers.spectr import spectr_factor
from specheads.papers.trees.growth import Nodes
from specheads.papers.trees.verification import Draft, TreeBlock, TreeDistribution

RULES = {"tree_match": TreeMatch(), "multi_round": MultiRound(), "spectr": SpecTr()}


def check(rule, target, draft, trees, length):
    actual = emitted(rule, target, draft, trees, length + 1)
    assert difference(actual, target) < 1e-9


@pytest.mark.parametrize(
    ("vocab_size", "count", "length"), [(2, 1, 3), (2, 2, 2), (2, 2, 3), (2, 3, 2), (3, 2, 2), (3, 4, 1), (2, 4, 2)]
)
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_iid_chains_are_lossless(rule, merge, vocab_size, count, length):
    for seed in range(4):
        target, draft = Model(vocab_size, 2 * seed, seed % 2 == 1), Model(vocab_size, 2 * seed + 1, seed % 4 > 1)
        trees = [(nodes, prob, True) for nodes, prob in trees_of(draft, count, length, merge)]
        assert sum(prob for _, prob, _ in trees) == pytest.approx(1)
        check(RULES[rule], target, draft, trees, length)


@pytest.mark.parametrize(("vocab_size", "count", "length"), [(2, 2, 2), (3, 2, 2), (3, 3, 1), (4, 3, 1)])
@pytest.mark.parametrize("rule", ["tree_match", "multi_round"])
def test_first_tokens_without_replacement_are_lossless(rule, vocab_size, count, length):
    for seed in range(4):
        target, draft = Model(vocab_size, 2 * seed), Model(vocab_size, 2 * seed + 1)
        trees = [(nodes, prob, False) for nodes, prob in trees_of(draft, count, length, replacement=False)]
        assert sum(prob for _, prob, _ in trees) == pytest.approx(1)
        check(RULES[rule], target, draft, trees, length)


def test_samples_without_replacement_verified_as_with_it_would_be_noticed():
    target, draft = Model(3, 4), Model(3, 5)
    trees = [(nodes, prob, True) for nodes, prob in trees_of(draft, 2, 1, replacement=False)]
    assert difference(emitted(MultiRound(), target, draft, trees, 2), target) > 0.1


def test_ignoring_repeated_samples_would_be_noticed():
    """Merged duplicates that are tested once bias the distribution by a hundredth or more."""
    target, draft, trees = Model(3, 4), Model(3, 5), []
    for nodes, prob in trees_of(draft, 3, 1):
        nodes.order = sorted(set(nodes.order))
        trees.append((nodes, prob, True))
    assert difference(emitted(MultiRound(), target, draft, trees, 2), target) > 1e-2


def test_chosen_trees_are_lossless_under_matching():
    """Any tree, including siblings with equal tokens."""
    nodes = Nodes()
    for parent, token in ((-1, 0), (-1, 1), (-1, 0), (0, 1), (0, 2), (2, 2), (3, 0), (1, 1)):
        nodes.add(parent, token, merge=False)
    for seed in range(4):
        target = Model(3, seed, seed % 2 == 1)
        check(TreeMatch(), target, Model(3, 9), [(nodes, 1.0, True)], 3)


def graph():
    """Return a graph whose nodes were linked by their last token, without copies, and the links."""
    nodes = Nodes()
    for parent, token in ((-1, 0), (-1, 1), (0, 1), (0, 2), (1, 0), (1, 2), (3, 0), (3, 1)):
        nodes.add(parent, token)
    return nodes, {2: 1, 4: 0, 5: 3, 6: 0, 7: 1}


class LastToken(Model):
    """A model whose distributions depend on the last token alone."""

    def __call__(self, prefix):
        return super().__call__(prefix[-1:])


def total_variation(shared, model):
    """Return that of three tokens after a graph, between what is emitted and the target."""
    nodes, links = graph()
    repeated = torch.tensor(unmerge(nodes, links, depth=3, most=64))
    actual = emitted(TreeMatch(shared), model, Model(3, 99), [(nodes, 1.0, True)], 3, repeated)
    joint = torch.tensor([model.joint(path) for path in itertools.product(range(3), repeat=3)], dtype=torch.float64)
    return (actual.flatten() - joint).abs().sum().item() / 2


def test_copies_of_a_graph_are_lossless_where_each_is_verified_after_its_path():
    assert max(total_variation(False, Model(3, seed, seed % 2 == 1)) for seed in range(20)) < 1e-12


def test_shared_logits_are_lossy():
    """By what TreeMatch states: the mean over 20 random targets, and the range."""
    values = [total_variation(True, Model(3, seed)) for seed in range(20)]
    assert (round(sum(values) / 20, 2), round(min(values), 2), round(max(values), 2)) == (0.11, 0.04, 0.21)


def test_shared_logits_are_lossless_where_the_last_tokens_decide():
    assert max(total_variation(True, LastToken(3, seed, seed % 2 == 1)) for seed in range(20)) < 1e-12


@pytest.mark.parametrize("distribution_of", [MultiRound().distribution, SpecTr().distribution])
def test_a_single_chain_is_verified_like_token_verification(distribution_of):
    target, draft = Model(4, 1), Model(4, 2)
    nodes = of_chains([(1, 3, 0, 2)])
    target_probs, draft_probs = distributions_after(target, nodes)[0], distributions_after(draft, nodes)[0]
    distribution = distribution_of(TreeBlock.of(nodes.draft(draft_probs), target_probs))
    plain = token_distribution(Block.of(torch.tensor([[1, 3, 0, 2]]), draft_probs[None, :4], target_probs[None]))
    torch.testing.assert_close(distribution.moves.cumprod(0), plain.survival[0].double(), atol=1e-12, rtol=0)
    for row in range(5):
        following, expected = distribution.next_probs(torch.tensor([row]))[0], plain.next_probs(torch.tensor([row]))[0]
        torch.testing.assert_close(following / following.sum(), expected / expected.sum(), atol=1e-12, rtol=0)


def test_the_factor_of_spectr_solves_its_equation():
    target, draft = (torch.stack([Model(5, seed + shift)(()) for seed in range(20)]) for shift in (0, 50))
    for k in (1, 2, 4, 8):
        rho = spectr_factor(target, draft, torch.full((20,), k))
        beta = torch.minimum(draft, target / rho[:, None]).sum(dim=1)
        torch.testing.assert_close(1 - (1 - beta) ** k, rho * beta, atol=1e-9, rtol=0)
        assert ((rho >= 1) & (rho <= k)).all()


def test_more_samples_are_accepted_more_often():
    target, draft = Model(4, 3), Model(4, 4)
    for rule in (MultiRound(), SpecTr()):
        probs = []
        for count in (1, 2, 4):
            distributions = (
                (rule.distribution(TreeBlock.of(n.draft(distributions_after(draft, n)[0]), distributions_after(target, n)[0])), p)
                for n, p in trees_of(draft, count, 1)
            )
            probs.append(sum(p * distribution.moves.sum().item() for distribution, p in distributions))
        assert probs[0] < probs[1] < probs[2]


def siblings(moves):
    """Return the distribution of a tree with two nodes at the context and one below the second."""
    nodes = Nodes()
    for parent, token in ((-1, 0), (-1, 1), (1, 2)):
        nodes.add(parent, token)
    block = TreeBlock.of(nodes.draft(torch.full((4, 3), 1 / 3)), torch.eye(3)[torch.tensor([0, 1, 2, 0])])
    return TreeDistribution(torch.tensor(moves, dtype=torch.float64), block.target_probs, block)


def test_walks_move_where_a_uniform_number_falls():
    """From the context to the first node below 0.25, to the second below 0.75, and from there to the third below 0.5."""
    distribution, below = siblings([0.25, 0.5, 0.5]), 2.0**-30
    for number, other, path, following in (
        (0.0, 0.0, [0, -1], 1),
        (0.25 - below, 0.9, [0, -1], 1),
        (0.25, 0.5, [1, -1], 2),
        (0.75 - below, 0.5 - below, [1, 2], 0),
        (0.75, 0.0, [-1, -1], 0),
    ):
        numbers = torch.tensor([number, other], dtype=torch.float64)
        verdict = distribution.decide(numbers, torch.tensor([0.5]))
        assert verdict.accepted_nodes.tolist() == path and verdict.next_token.tolist() == [following]
        assert verdict.num_accepted.tolist() == [sum(node >= 0 for node in path)]


def test_an_empty_tree_gives_the_targets_token():
    block = TreeBlock.of(Nodes().draft(torch.empty(1, 3)), torch.eye(3)[torch.tensor([2])])
    for rule in RULES.values():
        verdict = rule.distribution(block).decide(torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.5]))
        assert verdict.accepted_nodes.tolist() == [-1, -1]
        assert (verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ([0], [2])


def test_trees_that_do_not_fit_their_rule_are_refused():
    nodes = of_chains([(0, 1), (0, 2)])
    with pytest.raises(ValueError, match="^3 nodes need 4 distributions of the target, but there are 3$"):
        TreeBlock.of(nodes.draft(torch.ones(4, 3)), torch.ones(3, 3))
    chosen = TreeBlock.of(nodes.draft(None), torch.ones(4, 3))
    assert chosen.draft_probs is None and TreeMatch().distribution(chosen).moves.tolist() == [1, 1, 1]
    for rule in (MultiRound(), SpecTr()):
        with pytest.raises(ValueError, match="^the nodes were chosen, not sampled, so there are no distributions of the draft$"):
            rule.distribution(chosen)


def test_half_precision_distributions_of_trees_are_verified_in_float32():
    nodes = of_chains([(0, 1), (0, 2)])
    block = TreeBlock.of(nodes.draft(torch.ones(4, 3).bfloat16()), torch.ones(4, 3).bfloat16())
    assert block.draft_probs.dtype == block.target_probs.dtype == torch.float32


def test_a_chain_has_a_row_after_its_last_token_from_which_nothing_was_drafted():
    """A draft has a distribution for each of its tokens; the last row is that of tokens that could follow."""
    draft_probs, target_probs = torch.rand(2, 3), torch.rand(3, 3)
    block = TreeBlock.of(Draft.chain(torch.tensor([1, 2]), draft_probs, 2), target_probs)
    assert torch.equal(block.draft_probs, torch.cat([draft_probs, torch.zeros(1, 3)]))
    assert block.samples.tolist() == [[0], [1], [-1]] and block.samples.dtype == torch.long
    empty = TreeBlock.of(Nodes().draft(torch.empty(1, 3)), torch.rand(1, 3))
    assert empty.samples.shape == (1, 0) and empty.samples.dtype == torch.long
    uneven = TreeBlock.of(of_chains([(0, 1), (0, 2), (1, 1)]).draft(None), torch.rand(6, 3))
    assert uneven.samples.tolist() == [[0, 0, 1], [2, 3, -1], [4, -1, -1], *3 * [[-1, -1, -1]]]


def test_the_target_is_read_after_each_node_itself_unless_logits_are_shared():
    draft = replace(of_chains([(0, 1)], merge=False).draft(None), repeated=torch.tensor([0, 0]))
    target_probs = torch.rand(3, 3)
    assert torch.equal(TreeBlock.of(draft, target_probs).target_probs, target_probs)
    assert torch.equal(TreeBlock.of(draft, target_probs, shared=True).target_probs, target_probs[[0, 1, 1]])


def test_several_rows_have_the_distributions_of_each():
    """Where nothing is left of a row, it is the target's, whatever is left of others."""
    nodes = of_chains([(0, 1), (0, 2)])
    block = TreeBlock.of(nodes.draft(torch.rand(4, 3)), torch.rand(4, 3))
    rest = torch.tensor([[0.0, 0.5, 0.0], [0.0, 0.0, 0.0], [0.1, 0.2, 0.3], [0.0, 0.0, 0.0]])
    distribution = TreeDistribution(torch.zeros(3), rest, block)
    expected = torch.stack([rest[0], block.target_probs[1], rest[2], block.target_probs[3]])
    assert torch.equal(distribution.next_probs(torch.arange(4)), expected)
    for row in range(4):
        assert torch.equal(distribution.next_probs(torch.tensor([row])), expected[row : row + 1])


@pytest.mark.parametrize("distribution_of", [MultiRound().distribution, SpecTr().distribution])
def test_what_is_left_keeps_the_type_of_the_distributions(distribution_of):
    nodes = of_chains([(0, 1), (0, 2), (1, 1)])
    target_probs, draft_probs = (distributions_after(Model(3, seed), nodes)[0].float() for seed in (7, 8))
    distribution = distribution_of(TreeBlock.of(nodes.draft(draft_probs), target_probs))
    wide = distribution_of(TreeBlock.of(nodes.draft(draft_probs.double()), target_probs.double()))
    assert distribution.rest.dtype == torch.float32 and wide.rest.dtype == distribution.moves.dtype == torch.float64
    torch.testing.assert_close(distribution.rest.double(), wide.rest, atol=1e-6, rtol=0)
    torch.testing.assert_close(distribution.moves, wide.moves, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_samples_follow_the_distribution(rule):
    """10,000 samples of one tree; a false alarm has a probability below 1e-6 per comparison (five standard errors)."""
    target, draft = Model(3, 7), Model(3, 8)
    nodes = of_chains([(0, 1), (0, 2), (1, 1), (0, 1)])
    block = TreeBlock.of(nodes.draft(distributions_after(draft, nodes)[0]), distributions_after(target, nodes)[0])
    distribution, number = RULES[rule].distribution(block), 10_000
    uniform = torch.rand(number, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    verdicts = [distribution.decide(u[:2], u[2:]) for u in uniform]
    ended = torch.bincount(torch.tensor([path_end(v) for v in verdicts]) + 1, minlength=len(nodes.tokens) + 1)
    reach = [1.0]
    for move, parent in zip(distribution.moves.tolist(), nodes.parents, strict=True):
        reach.append(reach[parent + 1] * move)
    for row in range(len(nodes.tokens) + 1):
        children = [n for n, parent in enumerate(nodes.parents) if parent == row - 1]
        prob = reach[row] * (1 - distribution.moves[children].sum().item())
        share = ended[row].item() / len(verdicts)
        assert abs(share - prob) <= 5 * (prob * (1 - prob) / len(verdicts)) ** 0.5 + 1e-12


def path_end(verdict):
    """Return the last accepted node, or -1; checks that the path goes down."""
    path = [node for node in verdict.accepted_nodes.tolist() if node >= 0]
    assert len(path) == verdict.num_accepted.item()
    return path[-1] if path else -1
