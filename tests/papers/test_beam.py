"""Samples without replacement, and beams that end or are more than there are continuations."""

import itertools

import pytest
import torch
from fakes import tiny_pair
from statistics_helper import chi_square_p_value
from trees import drafter_in

from specheads import SpeculativeDecoder, Warp, papers, stopping
from specheads.pair.sampling import Uniforms, sample_distinct

TEXT, VOCAB, DEVICE, LENGTH = [0, 3, 1], 5, torch.device("cpu"), 4


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(VOCAB, scale=1.5)


def best_beam(pair, num_beams, warp=None, ends=None):
    """Return the tokens of a beam search's draft after TEXT."""
    stop = stopping.FixedLength(LENGTH)
    decoder = SpeculativeDecoder(pair, papers.Beam(num_beams), stop, warp=warp or Warp(), engine="eager")
    ends = torch.zeros(VOCAB, dtype=torch.bool) if ends is None else ends
    return drafter_in(decoder).draft(TEXT, stop.start_prompt(1, DEVICE), LENGTH, Uniforms(DEVICE, 0), ends).tokens


def test_more_beams_than_possible_continuations_leave_those_that_are_possible(pair):
    narrow = Warp(1.0, top_k=1)
    assert best_beam(pair, 3, narrow) == best_beam(pair, 1, narrow)


def test_the_best_beam_that_has_ended_ends_the_draft(pair):
    assert len(best_beam(pair, 3, ends=torch.ones(VOCAB, dtype=torch.bool))) == 1


def in_turn(weights, count):
    """Yield every sequence of `count` different items, sampled in turn by `weights`, with its probability."""
    possible = [item for item, weight in enumerate(weights) if weight > 0]
    for items in itertools.permutations(possible, min(count, len(possible))):
        prob, left = 1.0, sum(weights)
        for item in items:
            prob, left = prob * weights[item] / left, left - weights[item]
        yield items, prob


def p_value(observed, expected):
    chains = sorted(expected)
    counts = torch.tensor([float(observed.count(chain)) for chain in chains])
    assert counts.sum() == len(observed)
    return chi_square_p_value(counts, torch.tensor([expected[chain] for chain in chains]))


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
