"""Heads that learn while a request is decoded: the steps by hand, and only from rounds that have ended."""

import pytest
import torch

from benchmarks.head_adaptation import HEAD, MOVING, Tokens, adapted, measures
from benchmarks.head_search import WARP, Network, positions_of
from data_gen.run import generate_data
from data_gen.settings import Generation
from specheads.prompts.nano_source import NanoSource
from specheads.storage.data_set import load_split


@pytest.fixture(scope="module")
def tokens(nano, tmp_path_factory):
    settings = Generation(warp=WARP, max_new_tokens=16, max_prompt_tokens=128)
    folder = generate_data(nano, NanoSource(4, 0, 0), settings, tmp_path_factory.mktemp("adapted"), splits=("train",))
    data = positions_of(nano, list(load_split(folder, "train")))
    network = Network(HEAD, nano, data).eval()
    torch.nn.init.normal_(network.readout.weight, generator=torch.Generator().manual_seed(0))
    return Tokens(network, data, range(4), seed=0)


@pytest.mark.parametrize("name", list(MOVING))
def test_a_head_that_is_trusted_without_end_stays_as_it_is(tokens, name):
    logits = adapted(tokens, MOVING[name](tokens), 1e12)
    assert torch.allclose(logits, tokens.logit, atol=1e-6)
    assert not torch.allclose(adapted(tokens, MOVING[name](tokens), 1.0), tokens.logit, atol=1e-2)


def test_a_bias_moves_by_newton_steps(tokens):
    logits = adapted(tokens, MOVING["its bias"](tokens), 2.0)
    for row in range(4):
        bias, information, known = 0.0, 2.0, [0.0]
        for place in range(int(tokens.there[row].sum())):
            chance = torch.sigmoid(tokens.logit[row, place] + bias).item()
            information += chance * (1 - chance)
            bias += (tokens.outcome[row, place].item() - chance) / information
            known.append(bias)
            start = int(tokens.start[row, place])
            assert start <= place
            assert logits[row, place].item() == pytest.approx(tokens.logit[row, place].item() + known[start])


def test_the_last_layer_is_what_the_head_reads_out(tokens):
    there = tokens.there
    inputs = torch.cat([tokens.last[there], torch.ones(int(there.sum()), 1)], dim=1)
    solved = torch.linalg.lstsq(inputs, tokens.logit[there]).solution
    assert torch.allclose(inputs @ solved, tokens.logit[there], atol=1e-4)


def test_measures_are_of_tokens_that_are_there(tokens):
    spoiled = torch.where(tokens.there, tokens.logit, 1e6)
    assert measures(tokens, spoiled) == measures(tokens, tokens.logit)
