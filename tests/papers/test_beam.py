"""Beams that end, or are more than there are continuations."""

import pytest
import torch
from fakes import tiny_pair
from trees import drafter_in

from specheads import SpeculativeDecoder, Warp, papers, stopping
from specheads.pair.sampling import Uniforms

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
