"""Rules under block verification: the walk and the sums by hand, and drafts that both models have read."""

import numpy as np
import pytest
import torch

from benchmarks.block_stopping import LONGEST, block_chance, drafted, lengths_at, speed, token_chance, totals
from benchmarks.head_search import VARIANTS, WARP, Network, positions_of
from data_gen.run import generate_data
from data_gen.settings import Generation
from specheads.prompts.nano_source import NanoSource
from specheads.storage.data_set import load_split

RATIO = torch.tensor([[2.0, 0.5, 0.25, 3.0], [0.5, 4.0, 0.5, 1.0]])


def test_the_walk_is_reflected_and_the_product_is_not():
    assert block_chance(RATIO.log()).tolist() == [pytest.approx([1, 0.5, 0.125, 0.375]), pytest.approx([0.5, 1, 0.5, 0.5])]
    assert token_chance(RATIO.log()).tolist() == [pytest.approx([1, 0.5, 0.125, 0.125]), pytest.approx([0.5, 0.5, 0.25, 0.25])]


def test_a_draft_ends_where_its_survival_falls_below():
    assert lengths_at(torch.tensor([[0.9, 0.4, 0.8], [0.9, 0.8, 0.7]]), 0.5).tolist() == [2, 3]


def test_tokens_are_one_and_the_chances_of_what_was_drafted():
    chance = torch.rand(3, LONGEST)
    counts = totals(torch.tensor([1, 4, 2]), chance, np.array([0, 0, 1]), 2)
    expected = [2 + chance[0, :1].sum() + chance[1, :4].sum(), 1 + chance[2, :2].sum()]
    assert counts[:, 0] == pytest.approx([float(each) for each in expected], rel=1e-6)
    assert counts[:, 1:].tolist() == [[2, 5], [1, 2]]
    assert speed(counts, 5)[1] == pytest.approx(float(expected[1]) / (1 + 2 / 5))


@pytest.mark.full
@torch.no_grad()
def test_ratios_are_those_of_both_models_along_the_draft(nano, tmp_path):
    settings = Generation(warp=WARP, max_new_tokens=16, max_prompt_tokens=128)
    folder = generate_data(nano, NanoSource(2, 0, 0), settings, tmp_path, splits=("train",))
    rows = list(load_split(folder, "train"))
    network = Network(VARIANTS["a head as it is"], nano, positions_of(nano, rows)).eval()
    drafts = drafted(nano, rows, [network, network], seed=0)
    assert drafts.log_ratio.shape == drafts.acceptance.shape and torch.equal(drafts.acceptance, drafts.predicted_ratio)
    assert drafts.half(True).prompt.tolist() == [1] * (len(drafts.prompt) // 2)
    # The mean of t / d over a draft's first tokens is the target's mass on what the draft may propose, at most 1.
    first = drafted(nano, rows * 40, [network, network], seed=1).log_ratio[:, 0].exp()
    assert first.mean() < 1 + 5 * first.std() / len(first) ** 0.5
