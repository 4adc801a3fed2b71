"""What prunes trees: lessons against both models' distributions, trees without what they prune, and tokens at equal nodes."""

import numpy as np
import pytest
import torch

from benchmarks.head_search import WARP, positions_of
from benchmarks.tree_pruning import LESSONS, NUM_NODES, SIBLINGS, SurvivorTree, at_nodes, features_of, lesson_of, taught
from specheads import SpeculativeDecoder, Warp, drafting, stopping, verification
from specheads.decoding.baseline import Baseline
from specheads.features import drafting_features


@pytest.fixture(scope="module")
def data(nano, prompts):
    rows = [{"prompt_ids": ids, "response_ids": prompts[-1][:12]} for ids in prompts[:3]]
    return positions_of(nano, rows)


@torch.no_grad()
def distributions(pair, prompts):
    """The warped distributions of both models before every response token."""
    parts = []
    for ids in prompts[:3]:
        text = torch.tensor([[*ids, *prompts[-1][:12]]])
        parts.append([WARP(lm.logits(lm.hidden_states(text)[0, len(ids) - 1 : -1])) for lm in (pair.draft_lm, pair.target_lm)])
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def test_siblings_have_the_targets_probabilities(nano, prompts, data):
    draft, target = distributions(nano, prompts)
    places = torch.arange(len(data.hidden))
    of_chains, of_siblings, _ = LESSONS
    which, labels = lesson_of(of_siblings, data, places, greedy=False)
    best = draft.topk(SIBLINGS).indices
    assert torch.equal(data.ids.long().gather(1, which), best)
    torch.testing.assert_close(labels, target.gather(1, best).float(), atol=1e-3, rtol=0)
    which, labels = lesson_of(of_chains, data, places, greedy=False)
    token = data.ids.long().gather(1, which)
    expected = (target.gather(1, token) / draft.gather(1, token)).clamp(max=1).float()
    torch.testing.assert_close(labels, expected, atol=3e-2, rtol=0)  # kept in half precision
    which, labels = lesson_of(of_siblings, data, places, greedy=True)
    said = torch.tensor(prompts[-1][:12] * 3)
    assert torch.equal(labels.bool(), best == said[:, None]) and labels.sum(dim=1).max() <= 1


@torch.no_grad()
def test_heads_learn_from_the_features_that_decoding_gives_them(nano, prompts, data):
    text = torch.tensor([[*prompts[0], *prompts[-1][:12]]])
    hidden = nano.draft_lm.hidden_states(text)[0, len(prompts[0]) - 1 : -1]
    tokens = data.ids[:12, 2].long()
    names = ("hidden", "embedding", "draft_prob", "max_prob", "entropy")
    expected = drafting_features(names, nano.draft_lm.logits(hidden), tokens, hidden, nano.draft_lm.embed)
    given = features_of(nano, data, torch.arange(12), torch.full((12, 1), 2))
    assert given.keys() == expected.keys()
    for name in names:
        torch.testing.assert_close(given[name][:, 0], expected[name], atol=2e-2, rtol=2e-2, msg=name)


def test_a_lesson_is_learned(nano, data):
    heads = [taught(lesson, nano, data, False, epochs, 0) for lesson in LESSONS[1:] for epochs in (1, 150)]
    places = torch.arange(len(data.hidden))
    which, labels = lesson_of(LESSONS[1], data, places, False)
    errors = [(head(features_of(nano, data, places, which)).sigmoid() - labels).abs().mean().item() for head in heads]
    assert errors[1] < errors[0] / 2 and errors[3] < errors[2]


@pytest.mark.parametrize("kind", [drafting.Tree, SurvivorTree])
def test_trees_without_what_they_prune_are_lossless(nano, prompts, kind):
    alone = Baseline(nano, Warp(0), "eager")
    decoder = SpeculativeDecoder(
        nano, kind(theta_prob=0.3, theta_sib=0.3), stopping.FixedLength(6), verification.TreeMatch(), Warp(0), "eager"
    )
    for ids in prompts[:3]:
        assert torch.equal(decoder.generate(ids, 24).tokens, alone.generate(ids, 24).tokens)


def test_pruned_nodes_are_dropped_but_for_the_first(nano, prompts):
    drafted = []
    for kind in (drafting.Tree, SurvivorTree):
        for bound in (0.3, 0.999999):
            tree = kind(theta_prob=bound, theta_sib=0.0)
            decoder = SpeculativeDecoder(nano, tree, stopping.FixedLength(6), verification.TreeMatch(), Warp(0), "eager")
            rounds = decoder.generate(prompts[0], 24).rounds
            drafted.append([each.num_drafted for each in rounds if each.num_drafted])
    kept, only_first, survivors, one = drafted
    assert max(one) == 1 and set(only_first) == {4} and np.mean(survivors) < np.mean(kept)


def test_tokens_are_read_off_at_equal_nodes():
    nodes, tokens = np.array([2.0, 8.0, 64.0]), np.array([1.5, 2.5, 4.0])
    counts = np.stack([tokens, np.ones(3), nodes], axis=1)[:, None]
    read = at_nodes(counts, np.array([[1.0], [2.0]]))
    assert (
        read.shape == (2, len(NUM_NODES)) and read[0] == pytest.approx([2.0, 2.5, 3.0, 3.5]) and read[1] == pytest.approx(read[0])
    )
    assert np.isnan(at_nodes(counts[1:], np.ones((1, 1)))[0, 0])
