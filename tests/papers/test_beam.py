"""What a draft model grows, the best of beams or independent chains: where they end, and which
distributions stand at them.
"""

import itertools
from collections import Counter

import pytest
import torch
from fakes import tiny_pair
from trees import distributions_after, drafter_in

from specheads import SpeculativeDecoder, UserError, Warp, generate_baseline, papers, stopping
from specheads.pair.sampling import Uniforms
from specheads.papers.trees.growth import Frontier, Proposal
from specheads.papers.trees.verification import ROOT

TEXT = [0, 3, 1]
VOCAB = 5
DEVICE = torch.device("cpu")
LENGTH = 3


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(VOCAB, scale=1.5)


def draft_of(pair, way, length=LENGTH, warp=None, ends=(), seed=0):
    """Return a draft of up to `length` tokens after TEXT, and what drafted it.

    `ends` are the tokens that end a response.
    """
    stop = stopping.FixedLength(length)
    flags = torch.zeros(VOCAB, dtype=torch.bool)
    flags[list(ends)] = True
    drafter = drafter_in(SpeculativeDecoder(pair, way, stop, warp=warp or Warp(), engine="eager"))
    return (
        drafter.draft(TEXT, stop.start_prompt(1, DEVICE), length, Uniforms(DEVICE, seed), flags),
        drafter,
    )


def after(pair):
    """Return the draft model's distribution of the token after TEXT and a path, as a function of
    the path.
    """
    lm = pair.draft_lm
    return lambda path: Warp()(lm.logits(lm.hidden_states(torch.tensor([[*TEXT, *path]])))[0, -1])


@pytest.mark.parametrize(
    "ends", [(), *itertools.combinations(range(VOCAB), 1), (0, 2), range(VOCAB)]
)
def test_with_all_beams_the_draft_is_the_most_likely_chain_that_ends_or_is_full(pair, ends):
    model = after(pair)
    open_ones = {(): 1.0}
    chains = {}
    for length in range(1, LENGTH + 1):
        longer = {
            (*path, token): prob * p
            for path, prob in open_ones.items()
            for token, p in enumerate(model(path).tolist())
        }
        chains |= {
            path: prob for path, prob in longer.items() if path[-1] in ends or length == LENGTH
        }
        open_ones = {path: prob for path, prob in longer.items() if path[-1] not in ends}
    draft, _ = draft_of(pair, papers.Beam(VOCAB**LENGTH), ends=ends)
    assert tuple(draft.tokens) == max(chains, key=chains.get)
    torch.testing.assert_close(draft.draft_probs, distributions_after(model, draft)[0][:-1])


def test_beams_are_ranked_more_finely_than_single_precision_tells(pair):
    _, drafter = draft_of(pair, papers.Beam(1))
    for better in range(2):
        drafter.begin(TEXT, LENGTH)
        first = len(drafter.tree)
        proposals = [
            Proposal(number, ROOT, number, 0.3 * (1 + 1e-9 * (number == better)), False)
            for number in range(2)
        ]
        drafter.admit(proposals)
        logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]], dtype=torch.float64).expand(2, VOCAB)
        rows, tokens, _ = drafter.propose(Frontier([first, first + 1], logits, None, None), None)
        assert (rows.tolist(), tokens.tolist()) == ([better], [1])


@pytest.mark.parametrize("way", [papers.Beam, papers.Multi])
def test_a_single_chain_may_be_as_long_as_any_usual_rule_lets_it_grow(pair, way):
    draft, _ = draft_of(pair, way(1), length=20)
    assert len(draft) == 20
    torch.testing.assert_close(
        draft.draft_probs[:20], distributions_after(after(pair), draft)[0][:20]
    )


@pytest.mark.parametrize("merge", [True, False])
def test_chains_go_on_alone_when_others_have_ended(pair, merge):
    """Below a node there is a sample of each chain that leads to it, from the distribution there,
    unless its token ends them.
    """
    model = after(pair)
    stopped_levels = set()
    for seed in range(8):
        draft, _ = draft_of(pair, papers.Multi(3, merge), ends=(2, 4), seed=seed)
        chains = Counter(draft.order)
        below = Counter({ROOT: 0})
        for node in draft.order:
            below[draft.parents[node]] += 1
        expected, paths = distributions_after(model, draft)
        assert below[ROOT] == 3 and len(draft.draft_probs) == len(draft) + 1
        for node, path in enumerate(paths, ROOT):
            if node != ROOT:
                goes_on = path[-1] not in (2, 4) and len(path) < LENGTH
                assert below[node] == (chains[node] if goes_on else 0)
                stopped_levels |= (
                    {len(path)} if path[-1] in (2, 4) and max(draft.depth) >= len(path) else set()
                )
            if below[node]:
                torch.testing.assert_close(draft.draft_probs[node + 1], expected[node + 1])
    assert stopped_levels >= {1, 2}  # where a chain ended before others


def test_a_beam_may_be_verified_as_a_tree_but_is_none():
    """The single beam of a draft that is the target is what the target chooses."""
    pair = tiny_pair(VOCAB, scale=1.5, same=True)
    decoder = SpeculativeDecoder(
        pair, papers.Beam(1), stopping.FixedLength(3), papers.TreeMatch(), Warp(0), engine="eager"
    )
    out = decoder.generate(TEXT, 12, stop_tokens=[])
    assert (
        out.tokens.tolist()
        == generate_baseline(pair, TEXT, 12, warp=Warp(0), stop_tokens=[]).tokens.tolist()
    )
    assert [done.num_accepted for done in out.rounds] == 3 * [3]


def test_the_target_needs_no_more_memory_for_the_best_beam_than_for_a_chain(pair):
    sizes = []
    for way in (papers.Beam(3), None):
        decoder = SpeculativeDecoder(pair, way, engine="eager")
        decoder.generate(TEXT, 4)
        sizes.append(decoder.target_engine.memory_bytes)
    assert sizes[0] == sizes[1]


# At the first level, and where token 4 was read
@pytest.mark.parametrize("where", ["lm_head", "base_model.embed_tokens"])
def test_a_beam_search_that_meets_nan_is_told_of_the_draft(where):
    pair = tiny_pair(VOCAB, scale=1.5)
    pair.draft.get_submodule(where).weight[4] = torch.nan
    decoder = SpeculativeDecoder(pair, papers.Beam(VOCAB), stopping.FixedLength(3), engine="eager")
    with pytest.raises(
        UserError, match="^tiny-draft produced NaN logits.* after 0 tokens of the response"
    ):
        decoder.generate(TEXT, 8)
