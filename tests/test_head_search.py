"""The search for better heads: its labels and inputs are those of data sets and of decoding."""

import numpy as np
import pytest
import torch

from benchmarks.head_search import KEPT, VARIANTS, WARP, Network, labels_of, measured, positions_of, trained
from data_gen.run import generate_data
from data_gen.settings import Generation
from specheads.prompts.nano_source import NanoSource
from specheads.storage.data_set import load_split


@pytest.fixture(scope="module")
def rows(nano, tmp_path_factory):
    settings = Generation(warp=WARP, max_new_tokens=16, max_prompt_tokens=128)
    folder = generate_data(nano, NanoSource(5, 0, 0), settings, tmp_path_factory.mktemp("search"), splits=("train",))
    return list(load_split(folder, "train"))


@pytest.fixture(scope="module")
def data(nano, rows):
    return positions_of(nano, rows)


def test_labels_are_those_of_the_data_set(rows, data):
    drafted, accepted = (torch.tensor(np.concatenate([row[name] for row in rows])) for name in ("draft_ids", "accept_prob"))
    labels, weights = labels_of(data, torch.arange(len(drafted)))
    place = (data.ids.long() == drafted[:, None]).int().argmax(dim=1)
    assert torch.allclose(labels[torch.arange(len(place)), place].double(), accepted.double(), atol=2e-2)  # kept in 16 bits
    assert torch.allclose(weights.sum(dim=1), torch.ones(len(place)), atol=1e-2)
    assert data.ends.tolist() == np.cumsum([0, *(len(row["response_ids"]) for row in rows)]).tolist()


def test_the_target_is_known_up_to_the_last_token_before_a_round(nano, rows, data):
    network = Network(VARIANTS["4 responses, width 256, the target's state"], nano, data).eval()
    chosen = [0, 2]
    starts = data.starts(chosen, 0)
    with torch.no_grad():
        states = network._target(data, chosen, starts)
    number = 0
    for row in chosen:
        text, prompt = [*rows[row]["prompt_ids"], *rows[row]["response_ids"]], len(rows[row]["prompt_ids"])
        hidden = nano.target_lm.hidden_states(torch.tensor([text]), use_cache=False)[0].detach()
        for _ in rows[row]["response_ids"]:
            start = int(starts[number]) - data.ends[row]
            expected = network._scaled("target", hidden[prompt + start - 2].half()) if start else torch.zeros_like(states[0])
            assert torch.allclose(states[number], expected, atol=2e-2)
            number += 1
    assert number == len(states)


def test_rounds_begin_before_their_tokens_and_in_their_responses(data):
    starts = data.starts(range(5), 1)
    places = torch.arange(len(starts))
    first = torch.from_numpy(np.repeat(data.ends[:-1], np.diff(data.ends)))
    assert (starts <= places).all() and (starts >= first).all() and (starts[first.unique()] == first.unique()).all()


@pytest.mark.parametrize("name", ["all tokens' labels", "4 responses, width 256, the target's states by a GRU"])
def test_a_network_learns(nano, data, name):
    variant = VARIANTS[name]
    torch.manual_seed(0)
    before = measured(Network(variant, nano, data).eval(), data)
    after = measured(trained(variant, nano, data, len(data.rounds), None, 0), data)
    assert after[0] > before[0] + 0.05 and after[-1] < before[-1]
    assert data.ids.shape[1] == KEPT
