"""Sampled beams against ancestral sampling, an enumeration of the procedure, and transformers' beam sampling."""

import itertools
from collections import defaultdict
from math import log

import pytest
import torch
from fakes import tiny_pair
from statistics_helper import chi_square_p_value
from trees import drafter_in

from specheads import SpeculativeDecoder, UserError, Warp, papers, stopping
from specheads.decoding.rows import Row
from specheads.pair.sampling import Uniforms, sample_distinct

TEXT, VOCAB, DEVICE = [0, 3, 1], 5, torch.device("cpu")
NUM_BEAMS, LENGTH = 2, 2


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(VOCAB, scale=1.5)


def drafter_of(pair, way, warp=None, length=LENGTH):
    stop = stopping.FixedLength(length)
    decoder = SpeculativeDecoder(pair, way, stop, warp=warp or Warp(), engine="eager")
    no_ends = torch.zeros(VOCAB, dtype=torch.bool)

    def draft(*seed, ends=no_ends):
        decoder.draft_engine.rewind(0)
        return drafter_in(decoder).draft(TEXT, stop.start_prompt(1, DEVICE), length, Uniforms(DEVICE, *seed), ends)

    return draft


def chain_of(pair, warp, length):
    """Return tokens and distributions that autoregressive drafting gives with the uniform numbers of a seed."""
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(length), warp=warp, engine="eager")
    drafter, memory = decoder.single.rounds.drafter, decoder.single.rounds.memory

    def draft(seed):
        decoder.draft_engine.rewind(0)
        row = Row(0, list(TEXT), len(TEXT), 20, 20, frozenset(), Uniforms(DEVICE, seed), Uniforms(DEVICE, seed))
        drafter.start([row])
        drafter.draft([row], torch.zeros(VOCAB, dtype=torch.bool), length)
        return memory.sequence[0, 1 : row.num_drafted + 1].tolist(), memory.probs[0, : row.num_drafted]

    return draft


def distribution_after(pair, path, warp=None):
    lm = pair.draft_lm
    return (warp or Warp())(lm.logits(lm.hidden_states(torch.tensor([[*TEXT, *path]])))[0, -1])


def in_turn(weights, count):
    """Yield every sequence of `count` different items, sampled in turn by `weights`, with its probability."""
    possible = [item for item, weight in enumerate(weights) if weight > 0]
    for items in itertools.permutations(possible, min(count, len(possible))):
        prob, left = 1.0, sum(weights)
        for item in items:
            prob, left = prob * weights[item] / left, left - weights[item]
        yield items, prob


def enumerated(pair, num_beams, samples_per_beam, warp=None):
    """Return the probability of each chain of tokens to be the most likely beam.

    Args:
        samples_per_beam: at each level.
    """
    states = {(((), 0.0),): 1.0}  # sets of beams, each with its joint log-probability
    for count in samples_per_beam:
        following = defaultdict(float)
        for beams, prob in states.items():
            continuations = [
                ((*path, token), joint + log(p) if p > 0 else -torch.inf)
                for path, joint in beams
                for token, p in enumerate(distribution_after(pair, path, warp).tolist())
            ]
            weights = torch.tensor([joint for _, joint in continuations], dtype=torch.float64).exp().tolist()
            for items, chance in in_turn(weights, count * num_beams):
                best = sorted((continuations[item] for item in items), key=lambda beam: -beam[1])[:num_beams]
                following[tuple(best)] += prob * chance
        states = following
    chains = defaultdict(float)
    for beams, prob in states.items():
        chains[beams[0][0]] += prob
    return chains


def p_value(observed, expected):
    chains = sorted(expected)
    counts = torch.tensor([float(observed.count(chain)) for chain in chains])
    assert counts.sum() == len(observed)
    return chi_square_p_value(counts, torch.tensor([expected[chain] for chain in chains]))


@pytest.mark.parametrize("warp", [Warp(), Warp(0.8, top_k=3, top_p=0.9)])
def test_a_single_sampled_beam_is_ancestral_sampling(pair, warp):
    """With the same uniform numbers the same tokens, and the same distributions along them."""
    beam, chain = drafter_of(pair, papers.Beam(1, 1), warp, 6), chain_of(pair, warp, 6)
    seen = set()
    for seed in range(30):
        sampled, (tokens, probs) = beam(seed), chain(seed)
        assert sampled.tokens == tokens
        torch.testing.assert_close(sampled.draft_probs, probs)
        seen.add(tuple(sampled.tokens))
    assert len(seen) > 10


@pytest.mark.parametrize(
    ("samples_per_beam", "warp"),
    [(2, Warp()), (1, Warp(0.8, top_k=3, top_p=0.9)), pytest.param(1, Warp(), marks=pytest.mark.full)],
)
def test_the_best_sampled_beam_follows_the_enumerated_distribution(pair, samples_per_beam, warp):
    """Two beams of two tokens, 800 drafts; a false alarm has a probability of 1e-4."""
    expected = enumerated(pair, NUM_BEAMS, [samples_per_beam] * LENGTH, warp)
    assert sum(expected.values()) == pytest.approx(1)
    draft = drafter_of(pair, papers.Beam(NUM_BEAMS, samples_per_beam), warp)
    observed = [tuple(draft(seed).tokens) for seed in range(800)]
    assert p_value(observed, expected) > 1e-4


def test_transformers_samples_beams_by_the_same_procedure(pair):
    """But for its last token, where it takes the best of the first B samples. 4,000 texts, a false alarm has probability 1e-4."""
    torch.manual_seed(0)
    texts = pair.draft.generate(
        torch.tensor([TEXT] * 4000),
        attention_mask=torch.ones(4000, len(TEXT), dtype=torch.long),
        do_sample=True,
        num_beams=NUM_BEAMS,
        max_new_tokens=LENGTH,
        top_k=0,
        pad_token_id=0,
    )
    observed = [tuple(text[len(TEXT) :].tolist()) for text in texts]
    assert p_value(observed, enumerated(pair, NUM_BEAMS, [2, 1])) > 1e-4
    for other in ([1, 1], [2, 2]):
        assert p_value(observed, enumerated(pair, NUM_BEAMS, other)) < 1e-4  # the test tells procedures apart


def test_with_as_many_samples_as_continuations_sampling_is_a_search(pair):
    samples, search = (drafter_of(pair, papers.Beam(3, count), length=4) for count in (VOCAB, 0))
    assert samples(0).tokens == search(1).tokens


def test_more_samples_than_possible_continuations_leave_those_that_are_possible(pair):
    narrow = drafter_of(pair, papers.Beam(3, 2), Warp(1.0, top_k=1), 4)
    expected = drafter_of(pair, papers.Beam(1), Warp(1.0, top_k=1), 4)
    assert narrow(0).tokens == expected(0).tokens


def test_greedy_decoding_searches(pair):
    sampled, search = (drafter_of(pair, way, Warp(0), 4) for way in (papers.Beam(3, 1), papers.Beam(3)))
    assert {tuple(sampled(seed).tokens) for seed in range(5)} == {tuple(search(0).tokens)}


def test_the_best_sampled_beam_that_has_ended_ends_the_draft(pair):
    ends = torch.ones(VOCAB, dtype=torch.bool)
    assert len(drafter_of(pair, papers.Beam(3, 2), length=4)(0, ends=ends).tokens) == 1


def test_distinct_samples_are_taken_in_turn():
    """Of every row, the frequencies of both tokens against their probabilities; a false alarm has probability 1e-4 each."""
    weights, number = torch.tensor([[2.0, 1.0, 0.0, 5.0], [1.0, 1.0, 3.0, 0.0]], dtype=torch.float64), 20_000
    numbers = torch.rand(number, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, entries = sample_distinct(weights.expand(number, 2, 4), numbers)
    torch.testing.assert_close(entries, weights.expand(number, 2, 4).gather(-1, tokens))
    for row in range(2):
        expected = dict(in_turn(weights[row].tolist(), 2))
        assert p_value([tuple(pair) for pair in tokens[:, row].tolist()], expected) > 1e-4
    _, entries = sample_distinct(weights, numbers[0, :, :1].expand(2, 4))
    assert (entries > 0).sum(dim=-1).tolist() == [3, 3]


@pytest.mark.parametrize("value", [-1, 0.5, True])
def test_an_impossible_number_of_samples_is_refused(value):
    with pytest.raises(UserError, match=f"drafting.samples_per_beam={value} must be a non-negative integer"):
        papers.Beam(8, value)
