"""Heads are trained by a plain call, without a composed config."""

import json

import pytest
import torch
from feature_drafts import reading_pair

import specheads
from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.errors import UserError
from specheads.heads.batch import collate
from specheads.heads.config import DEFAULT_INPUTS
from specheads.prompts.sources import NanoSource
from specheads.storage.data_set import load_split
from specheads.training.heads.bank import HeadBank, constant_loss, weighted_bce
from specheads.training.heads.head_module import HeadModule
from specheads.training.heads.mixed_responses import MixedResponses

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
    names = ["lookahead-d1-r1", "specdecpp-d1-r6"]
    assert trained.names == names and trained.folder == tmp_path / "both" / "heads"
    assert (
        set(trained.information.explained)
        == {"free logistic", *names}
        == {"free logistic", *trained.calibrated}
    )
    kept = json.loads((tmp_path / "both" / "test.json").read_text())
    assert set(names) == set(trained.test) == kept.keys()
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


@pytest.mark.parametrize(("heads", "lr"), [("lookahead", 0.1), ("specdecpp", 0.5)])
def test_the_epoch_with_the_smallest_dev_loss_is_exported(nano, data, tmp_path, heads, lr):
    settings = specheads.HeadTraining(
        heads=heads,
        head={"depth": 1},
        trainer={"max_epochs": 6, "accelerator": "cpu"},
        optimizer={"lr": lr},
        calibration=None,
    )
    trained = specheads.train_heads(nano, data, settings, run=tmp_path)
    (name,) = trained.names
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    key = f"dev/{name}/loss"
    losses = [metrics[key] for _, metrics in checkpoint["history"] if key in metrics]
    assert len(losses) == 6 and min(losses) < losses[-1]  # so that another epoch is the best
    loss = trained.dev[name]
    assert (loss.epoch, loss.best, loss.last) == (
        losses.index(min(losses)),
        min(losses),
        losses[-1],
    )
    head = specheads.load_head(trained.folder)
    specs = settings.specs(nano)
    module = HeadModule(HeadBank(specs, 0), nano, settings.optimizer)
    module.load_weights({name: head.state_dict()})
    rows = MixedResponses(
        load_split(data.folder, "dev"), settings.predicts, settings.response_share, settings.seed
    )
    total = weight = 0.0
    for number in range(len(rows)):
        batch = collate([rows[0, number]])
        sums, weights = module.bank.losses(module.bank(module.features(batch)), batch.label)
        total += sums.item()
        weight += weights.item()
    assert total / weight == pytest.approx(min(losses), rel=1e-4)


def test_heads_of_a_draft_that_reads_its_target_know_the_depth(nano, tmp_path):
    pair = reading_pair(nano, layers=(1, 3, 4), borrows=True)
    source = NanoSource(12, 4, 4)
    generation = DataGeneration(max_new_tokens=12, max_prompt_tokens=256)
    folder = generate_data(pair, source, generation, tmp_path)
    data = specheads.GeneratedData(folder, list(source.load(chats=False)), generation.limits)
    settings = specheads.HeadTraining(head={"depth": 1}, **(ONE_EPOCH | {"calibration": None}))
    trained = specheads.train_heads(pair, data, settings, run=tmp_path / "stored")
    again = specheads.train_heads(
        pair, data, settings.but(features_budget=0), run=tmp_path / "computed"
    )
    inputs = {
        "lookahead-d1-r1": (*DEFAULT_INPUTS["next_token"], "depth"),
        "specdecpp-d1-r6": (*DEFAULT_INPUTS["input_token"], "depth"),
    }
    for name, expected in inputs.items():
        head = specheads.load_head(trained.folder / name)
        assert head.config.inputs == expected
        assert again.test[name] == pytest.approx(trained.test[name], rel=1e-4)
        rule = specheads.stopping.HeadThreshold(head, 0.5)
        decoder = specheads.SpeculativeDecoder(pair, stopping=rule)
        out = decoder.generate([5, 6, 7], 20)
        assert out.stats.num_drafted > 0
    for path in (tmp_path / "stored").rglob("*.ckpt"):
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all(name.startswith("bank.") for name in state)
    with pytest.raises(UserError, match="names 'depth', but the draft .* does not read its target"):
        specheads.train_heads(
            nano, data, settings.but(head={"inputs": ["depth"]}), run=tmp_path / "alone"
        )


def test_the_constant_loss_is_the_smallest_of_all_constants():
    labels = torch.rand(1000, generator=torch.Generator().manual_seed(0)) ** 0.3
    for reject_weight in (1.0, 6.0):
        losses = []
        for logit in torch.linspace(-3, 3, 601):
            total, weight = weighted_bce(logit.expand(1000), labels, reject_weight)
            losses.append((total / weight).item())
        assert constant_loss(labels, reject_weight) == pytest.approx(min(losses), abs=1e-5)
