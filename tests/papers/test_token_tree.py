"""Trees and i.i.d. chains against distributions that are computed path by path."""

from collections import Counter

import pytest
import torch
from fakes import tiny_pair
from trees import drafter_in

from specheads import SpeculativeDecoder, UserError, Warp, papers, stopping
from specheads.pair.sampling import Uniforms
from specheads.papers.trees.verification import ROOT

TEXT = [0, 3, 1]
VOCAB = 6


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(VOCAB, scale=1.5)


def distribution_after(pair, path, warp=None):
    lm = pair.draft_lm
    return (warp or Warp())(lm.logits(lm.hidden_states(torch.tensor([[*TEXT, *path]])))[0, -1])


def draft_of(pair, way, stop, warp=None, limit=20, seed=0, ends=()):
    decoder = SpeculativeDecoder(pair, way, stop, warp=warp or Warp(0), engine="eager")
    drafter = drafter_in(decoder)
    flags = torch.zeros(VOCAB, dtype=torch.bool)
    flags[list(ends)] = True
    draft = drafter.draft(
        TEXT,
        stop.start_prompt(1, torch.device("cpu")),
        limit,
        Uniforms(torch.device("cpu"), seed),
        flags,
    )
    return draft, drafter


def tokens_above(draft, node):
    return [draft.tokens[above] for above in draft.path(node)]


def children_by_node(draft):
    by_parent = {node: [] for node in range(-1, len(draft.tokens))}
    for node, parent in enumerate(draft.parents):
        by_parent[parent].append(node)
    return by_parent


@pytest.mark.parametrize(
    ("theta_prob", "theta_sib"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.6), (0.15, 0.5)]
)
def test_a_node_has_the_most_likely_children_unless_it_is_pruned(pair, theta_prob, theta_sib):
    way = papers.Tree(3, theta_prob, theta_sib, max_nodes=1000, max_width=1000)
    draft, _ = draft_of(pair, way, stopping.FixedLength(4))
    for node, children in children_by_node(draft).items():
        distribution = distribution_after(pair, tokens_above(draft, node))
        top = distribution.topk(3).indices.tolist()
        if node != ROOT:
            siblings = distribution_after(pair, tokens_above(draft, draft.parents[node]))
            prob = siblings[draft.tokens[node]]
            leaf = draft.depth[node] == 3 or prob < theta_prob or prob < theta_sib * siblings.max()
            assert leaf == (not children)
        if children:
            assert [draft.tokens[child] for child in children] == top
    assert max(draft.depth) == 3 and draft.draft_probs is None
    assert draft.num_draft_calls == 4


def test_of_too_many_nodes_the_most_likely_paths_are_taken(pair):
    whole, _ = draft_of(
        pair, papers.Tree(3, 0.0, 0.0, max_nodes=1000, max_width=1000), stopping.FixedLength(2)
    )
    few, _ = draft_of(pair, papers.Tree(3, 0.0, 0.0, max_nodes=7), stopping.FixedLength(2))
    paths = {
        node: tokens_above(whole, node)
        for node in range(len(whole.tokens))
        if whole.depth[node] == 1
    }
    prob = {
        n: (distribution_after(pair, [])[p[0]] * distribution_after(pair, p[:1])[p[1]]).item()
        for n, p in paths.items()
    }
    best = sorted(prob, key=lambda node: -prob[node])[:4]
    kept = [tokens_above(few, node) for node in range(3, 7)]
    assert len(few.tokens) == 7 and sorted(kept) == sorted(paths[node] for node in best)


def test_a_token_that_ends_the_response_ends_its_path(pair):
    draft, _ = draft_of(pair, papers.Tree(3, 0.0, 0.0), stopping.FixedLength(4), ends=[2, 4])
    children = children_by_node(draft)
    ended = [node for node, token in enumerate(draft.tokens) if token in (2, 4)]
    assert ended and all(not children[node] for node in ended)


def test_a_stopping_rule_stops_each_path_separately(pair):
    """A path has no more tokens once its last one was less likely than the threshold."""
    stop = stopping.Confidence(0.25, max_tokens=5)
    draft, _ = draft_of(pair, papers.Tree(3, 0.0, 0.0, max_nodes=1000, max_width=1000), stop)
    children = children_by_node(draft)
    lengths = set()
    for node in range(len(draft.tokens)):
        prob = distribution_after(pair, tokens_above(draft, draft.parents[node]))[
            draft.tokens[node]
        ]
        if draft.depth[node] < 4:
            assert (prob < 0.25) == (not children[node])
        lengths |= {draft.depth[node]} if not children[node] else set()
    assert len(lengths) > 2


def test_a_rule_learns_from_the_accepted_path_and_its_first_children(pair):
    draft, drafter = draft_of(pair, papers.Tree(2, 0.0, 0.0), stopping.FixedLength(3))
    children = children_by_node(draft)
    second = children[ROOT][1]
    state, length, accepted = drafter.after([second])
    assert (length, accepted) == (3, 1) and state.num_drafted.tolist() == [3]
    assert drafter.after([])[1:] == (3, 0)


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_tree_is_no_deeper_than_the_response_allows(pair, limit):
    for way in (papers.Tree(), papers.Graph(), papers.Multi(), papers.Beam(2)):
        draft, drafter = draft_of(pair, way, stopping.FixedLength(4), Warp(1.0), limit=limit)
        assert len(draft.tokens) == 0 if not limit else max(draft.depth) == limit - 1
        assert draft.num_draft_calls == limit
        drafter.keep([])


def test_independent_chains_are_sampled_from_the_distribution_and_merged(pair):
    warp = Warp(1.0)
    firsts = Counter()
    for seed in range(300):
        draft, _ = draft_of(pair, papers.Multi(4), stopping.FixedLength(2), warp, seed=seed)
        roots = [node for node in draft.order if draft.depth[node] == 0]
        assert len(roots) == 4 and len(draft.order) == 8
        assert len({(draft.parents[n], draft.tokens[n]) for n in range(len(draft.tokens))}) == len(
            draft.tokens
        )
        firsts.update(draft.tokens[node] for node in roots)
    distribution = distribution_after(pair, [], warp)
    for token in range(VOCAB):  # a false alarm in one of 6 has probability below 1e-5
        share = firsts[token] / 1200
        prob = distribution[token].item()
        assert abs(share - prob) < 5 * (prob * (1 - prob) / 1200) ** 0.5
    for node in range(len(draft.tokens)):
        parent = draft.parents[node]
        torch.testing.assert_close(
            draft.draft_probs[parent + 1],
            distribution_after(pair, tokens_above(draft, parent), warp),
        )


def test_a_rule_whose_drafts_exceed_the_memory_is_refused(pair):
    # A chain ends within the window
    SpeculativeDecoder(pair, engine="eager").with_stopping(stopping.FixedLength(30))
    for way in (papers.Beam(3), papers.Multi(2)):
        with pytest.raises(UserError, match="memory for paths of 20"):
            SpeculativeDecoder(pair, way, stopping.FixedLength(3), engine="eager").with_stopping(
                stopping.FixedLength(30)
            )
    decoder = SpeculativeDecoder(pair, papers.Multi(4), stopping.FixedLength(3), engine="eager")
    # A tree has its own limit
    SpeculativeDecoder(pair, papers.Tree(), engine="eager").with_stopping(stopping.FixedLength(30))
    with pytest.raises(
        UserError,
        match="FixedLength drafts up to 30 tokens, but this decoder has memory for paths of 20",
    ):
        decoder.with_stopping(stopping.FixedLength(30))


def test_a_text_may_fill_the_window_to_its_end(pair):
    """A tree at the end has more nodes than positions are left."""
    for engine in ("eager", "cuda_graph"):
        decoder = SpeculativeDecoder(
            pair, papers.Tree(4, 0.0, 0.0), stopping.FixedLength(4), warp=Warp(0), engine=engine
        )
        out = decoder.generate([0, 1, 2], 200, stop_tokens=[])
        assert len(out.tokens) == pair.window - 3 and out.finish_reason == "context"
