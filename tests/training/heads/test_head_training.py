"""Heads are trained by a plain call, without a composed config."""

import json

import pytest
import torch

import specheads
from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.prompts.sources import NanoSource

ONE_EPOCH = {"trainer": {"max_epochs": 1, "accelerator": "cpu"}, "calibration": 2}


@pytest.fixture(scope="module")
def data(nano, tmp_path_factory):
    source = NanoSource(12, 4, 4)
    generation = DataGeneration(max_new_tokens=12, max_prompt_tokens=256)
    folder = generate_data(nano, source, generation, tmp_path_factory.mktemp("data"))
    return specheads.GeneratedData(folder, list(source.load(chats=False)), generation.limits)


def test_both_kinds_are_trained_as_if_alone_and_compared(nano, data, tmp_path):
    both = specheads.HeadTraining(head={"depth": 1}, **ONE_EPOCH)
    trained = specheads.train_heads(nano, data, both, run=tmp_path / "both")
    names = ["next_token-d1-r1", "input_token-d1-r6"]
    assert trained.names == names and trained.folder == tmp_path / "both" / "heads"
    assert (
        set(trained.information.explained)
        == {"free logistic", *names}
        == {"free logistic", *trained.calibrated}
    )
    rivals = {"logistic of the three, lookahead", "logistic of the three, specdecpp"}
    assert (
        rivals
        < set(trained.test)
        == json.loads((tmp_path / "both" / "test.json").read_text()).keys()
    )
    for kind, name in zip(("lookahead", "specdecpp"), names, strict=True):
        alone = specheads.train_heads(
            nano, data, both.but(heads=kind, calibration=None), run=tmp_path / kind
        )
        assert (
            alone.folder == tmp_path / kind / "heads" / name
            and alone.test[name] == trained.test[name]
        )
        weights = [
            specheads.load_head(folder / name).state_dict()
            for folder in (trained.folder, tmp_path / kind / "heads")
        ]
        assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
