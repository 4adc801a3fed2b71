import contextlib
import copy
import math
from dataclasses import replace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from training_runs import quiet_trainer

from specheads.errors import UserError
from specheads.heads.batch import collate
from specheads.heads.head import HeadConfig
from specheads.heads.metrics import prediction_metrics
from specheads.training.curve_module import cosine_after_warmup
from specheads.training.heads.bank import HeadBank
from specheads.training.heads.head_module import HeadModule
from specheads.training.heads.mixed_responses import MixedResponses
from specheads.training.heads.settings import HeadSpec
from specheads.training.loaders import ResumableData
from specheads.training.settings import Optimizer

KINDS = ["input_token", "next_token"]
NUM_ROWS = 12


class Recorded(MixedResponses):
    """Mixed responses that remember what was asked of them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.keys = []

    def __getitem__(self, key):
        self.keys.append(key)
        return super().__getitem__(key)


@pytest.fixture(scope="module")
def rows(nano, prompts):
    """Rows that a head can learn: drafted tokens of even id are accepted, of odd id mostly not."""
    generator = np.random.default_rng(0)
    made = []
    for i in range(NUM_ROWS):
        length = int(generator.integers(8, 17))
        drafted = generator.integers(2, 12, size=length)
        made.append(
            {
                "prompt_ids": prompts[i % len(prompts)][:6],
                "response_ids": generator.integers(2, 12, size=length).tolist(),
                "draft_ids": drafted.tolist(),
                "accept_prob": np.where(drafted % 2, 0.1, 1.0).tolist(),
                "more_draft_ids": [],
                "more_accept_prob": [],
            }
        )
    return made


def data_of(rows, predicts, batch_size=4, response_share=0.15):
    splits = {"train": rows, "dev": rows[:5], "test": rows[5:9]}
    recorded = {name: Recorded(part, predicts, response_share, 0) for name, part in splits.items()}
    return ResumableData(recorded, batch_size=batch_size, seed=0, collate=collate)


def spec(nano, predicts="next_token", name="head", reject_weight=1.0, **kwargs):
    return HeadSpec(
        name,
        HeadConfig(hidden_size=nano.draft_lm.hidden_size, predicts=predicts, **kwargs),
        reject_weight=reject_weight,
    )


def new_module(nano, *specs, lr=1e-3):
    return HeadModule(HeadBank(list(specs), seed=0), nano, Optimizer(lr=lr))


@torch.no_grad()
def predictions(module, data, split):
    """Logits (heads, N) and labels (N,) over a whole split."""
    batches = list(data.batches(split))
    logits = torch.cat([module.bank(module.features(batch)) for batch in batches], dim=1)
    return logits, torch.cat([batch.label for batch in batches])


def loss(module, data, split="train"):
    logits, labels = predictions(module, data, split)
    sums, weights = module.bank.losses(logits, labels)
    return (sums / weights).tolist()


def parameters(module):
    return {name: value.detach().clone() for name, value in module.bank.state_dict().items()}


# --- training


@pytest.mark.parametrize("predicts", KINDS)
def test_training_lowers_the_loss_well_below_that_of_a_constant(nano, rows, tmp_path, predicts):
    module = new_module(nano, spec(nano, predicts, depth=1), lr=3e-3)
    data = data_of(rows, predicts)
    before = loss(module, data)[0]
    quiet_trainer(tmp_path, max_epochs=15).fit(module, data)
    logits, labels = predictions(module, data, "train")
    share = labels.mean()
    constant = -(share * share.log() + (1 - share) * (1 - share).log()).item()
    assert loss(module, data)[0] < 0.7 * constant < before
    assert prediction_metrics(logits[0], labels)["auroc"] > 0.8
    module.check_not_constant(module.features(next(iter(data.batches("dev")))))


def test_the_draft_is_neither_trained_nor_part_of_the_module_or_its_checkpoint(
    nano, rows, tmp_path
):
    before = {name: value.clone() for name, value in nano.draft.state_dict().items()}
    module = new_module(nano, spec(nano, depth=1))
    fit = quiet_trainer(tmp_path, max_epochs=1)
    fit.fit(module, data_of(rows, "next_token"))
    assert all(torch.equal(value, before[name]) for name, value in nano.draft.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in nano.draft.parameters())
    ours = {f"bank.{name}" for name in module.bank.state_dict()}
    trained = {id(p) for group in fit.optimizers[0].param_groups for p in group["params"]}
    assert (
        trained == {id(p) for p in module.bank.parameters()} == {id(p) for p in module.parameters()}
    )
    fit.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["state_dict"].keys() == ours
    assert (tmp_path / "last.ckpt").stat().st_size < 5 * 4 * sum(
        p.numel() for p in module.parameters()
    )


def test_every_epoch_mixes_again_and_validation_never_changes(nano, rows, tmp_path):
    data = data_of(rows, "input_token")
    quiet_trainer(tmp_path, max_epochs=3).fit(
        new_module(nano, spec(nano, "input_token", depth=0)), data
    )
    train = data.splits["train"].keys
    dev = data.splits["dev"].keys
    assert [epoch for epoch, _ in train] == [0] * NUM_ROWS + [1] * NUM_ROWS + [2] * NUM_ROWS
    orders = [tuple(row for epoch, row in train if epoch == number) for number in range(3)]
    assert all(sorted(order) == list(range(NUM_ROWS)) for order in orders) and len(set(orders)) == 3
    assert dev == [(0, row) for row in range(5)] * 3


def test_a_batch_without_labels_does_not_spoil_the_head(nano, rows, tmp_path):
    # A head that judges its input skips kept tokens, and a short response may have kept them all.
    short = [
        {name: value[:1] if name != "prompt_ids" else value for name, value in row.items()}
        for row in rows
    ]
    data = data_of(short, "input_token", batch_size=1, response_share=0.5)
    sizes = [len(batch.label) for batch in data.batches("train", shuffle=True)]
    assert 0 in sizes and 1 in sizes
    module = new_module(nano, spec(nano, "input_token", depth=1))
    quiet_trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(module, data)
    assert all(value.isfinite().all() for value in parameters(module).values())


# --- steps of several batches


def in_float64(items):
    batch = collate(items)
    return replace(batch, label=batch.label.double())


class Scaled(MixedPrecision):
    """Losses are scaled as for 16-bit gradients, which are in float64 nevertheless."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))

    def autocast_context_manager(self):
        return contextlib.nullcontext()


def descend(module, data, folder, num_batches, clip, **settings):
    """Train an epoch by plain gradient descent, `num_batches` to a step.

    Return the bank of this process as it was before.
    """
    before = []

    class Copy(L.Callback):
        def on_train_start(self, trainer, module):
            before.append(copy.deepcopy(module.bank))

    module.configure_optimizers = lambda: torch.optim.SGD(module.bank.parameters(), lr=0.1)
    settings |= {
        "accumulate_grad_batches": num_batches,
        "gradient_clip_val": clip,
        "limit_val_batches": 0,
        "log_every_n_steps": 1,
    }
    quiet_trainer(folder, 1, callbacks=[Copy()], **settings).fit(module, data)
    return next(iter(before), None)


def stepped(module, bank, data, steps, clip):
    """Do what `descend` should: take each of `steps`, keys of rows, as one batch.

    Returns the losses of the bank's heads.
    """
    logged = []
    for keys in steps:
        batch = in_float64([data.splits["train"][key] for key in keys])
        sums, weights = bank.losses(bank(module.features(batch)), batch.label)
        bank.zero_grad()
        (sums / weights).sum().backward()
        if clip:
            bank.clip_gradients(clip)
        logged.append((sums / weights).tolist())
        with torch.no_grad():
            for parameter in bank.parameters():
                parameter -= 0.1 * parameter.grad
    return logged


@pytest.mark.parametrize(
    ("predicts", "empty", "clip", "plugins"),
    [
        ("next_token", False, None, None),
        ("next_token", True, 0.05, None),
        ("input_token", True, None, None),
        ("input_token", False, 0.05, None),
        ("next_token", False, 0.05, "scaled"),
    ],
)
def test_a_step_of_several_batches_is_that_of_one_large_batch(
    nano64, rows, tmp_path, predicts, empty, clip, plugins
):
    """Two heads of different weights; batches of different numbers of labels.

    The epoch's last step has fewer batches.
    """
    keys = data_of(rows, predicts).batches("train", shuffle=True).keys(0)
    nothing = {row for _, row in keys[:2]} if empty else set()
    columns = ("response_ids", "draft_ids", "accept_prob")
    rows = [
        row | {name: [] for name in columns} if i in nothing else row for i, row in enumerate(rows)
    ]
    data = data_of(rows, predicts, 2, 0.5)
    data.collate = in_float64
    module = new_module(
        nano64,
        spec(nano64, predicts, "linear", depth=0),
        spec(nano64, predicts, "deep", 6.0, depth=2),
    ).double()
    settings = {"plugins": Scaled()} if plugins else {}
    expected = descend(module, data, tmp_path, 4, clip, **settings)
    start = copy.deepcopy(expected)
    batches = [
        in_float64([data.splits["train"][key] for key in keys[i : i + 2]])
        for i in range(0, NUM_ROWS, 2)
    ]
    assert (
        len({len(batch.label) for batch in batches}) > 2 and (len(batches[0].label) == 0) == empty
    )
    logged = stepped(module, expected, data, (keys[:8], keys[8:]), clip)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.bank.state_dict()[name], value, atol=1e-10, rtol=0)
    moved = max(
        (a - b).abs().max().item()
        for a, b in zip(expected.parameters(), start.parameters(), strict=True)
    )
    assert moved > 1e-3
    actual = [[point["train/linear/loss"], point["train/deep/loss"]] for _, point in module.history]
    assert actual == [pytest.approx(values, abs=1e-10) for values in logged]


def test_processes_and_batches_of_a_step_are_one_large_batch(nano64, rows, tmp_path):
    """Two processes take every other row."""
    data = data_of(rows, "input_token", 4, 0.5)
    data.collate = in_float64
    module = new_module(
        nano64,
        spec(nano64, "input_token", "one", depth=0),
        spec(nano64, "input_token", "six", 6.0, depth=1),
    )
    expected = copy.deepcopy(module.double().bank)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process has no others
    try:
        descend(module, data, tmp_path, 2, 0.05, devices=2, strategy="ddp_fork")
    finally:
        torch.set_num_threads(num_threads)
    keys = data.batches("train", shuffle=True).keys(0)
    stepped(module, expected, data, (keys[:8], keys[8:]), 0.05)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.bank.state_dict()[name], value, atol=1e-10, rtol=0)


# --- scale of the inputs


def test_the_scale_of_inputs_is_fixed_for_look_ahead_heads_alone(nano, rows, tmp_path):
    module = new_module(nano, spec(nano, depth=0))
    data = data_of(rows, "next_token")
    quiet_trainer(tmp_path, 1).fit(module, data)
    head = module.bank.heads["head"]
    features = [module.features(batch) for batch in data.batches("train")]
    inputs = torch.cat([head.assemble(part) for part in features])
    torch.testing.assert_close(head.input_mean, inputs.mean(dim=0))
    torch.testing.assert_close(head.input_scale, 1 / inputs.std(dim=0))
    module = new_module(nano, spec(nano, "input_token", depth=0))
    quiet_trainer(tmp_path, 1).fit(module, data_of(rows, "input_token"))
    head = module.bank.heads["head"]
    assert not head.input_mean.any() and (head.input_scale == 1).all()


# --- metrics


def test_dev_metrics_are_those_of_all_dev_positions_together(nano, rows, tmp_path):
    specs = [spec(nano, name="one", depth=0), spec(nano, name="six", reject_weight=6.0, depth=1)]
    module = new_module(nano, *specs)
    data = data_of(rows, "next_token", batch_size=2)
    fit = quiet_trainer(tmp_path, max_epochs=2)
    fit.fit(module, data)
    logits, labels = predictions(module, data, "dev")
    expected = {
        f"dev/{s.name}/loss": value
        for s, value in zip(specs, loss(module, data, "dev"), strict=True)
    }
    for s, row in zip(specs, logits, strict=True):
        expected |= {
            f"dev/{s.name}/{name}": value for name, value in prediction_metrics(row, labels).items()
        }
    actual = {
        name: value.item()
        for name, value in fit.callback_metrics.items()
        if name.startswith("dev/")
    }
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("predicts", KINDS)
def test_results_are_those_of_all_test_positions_together(nano, rows, tmp_path, predicts):
    module = new_module(nano, spec(nano, predicts, depth=0))
    data = data_of(rows, predicts)
    fit = quiet_trainer(tmp_path, max_epochs=1)
    fit.fit(module, data)
    fit.test(module, data, verbose=False)
    logits, labels = predictions(module, data, "test")
    assert list(module.test_results) == ["head"]
    assert module.test_results["head"] == pytest.approx(
        prediction_metrics(logits[0], labels), rel=1e-5
    )
    assert fit.callback_metrics["test/head/auroc"].item() == pytest.approx(
        module.test_results["head"]["auroc"]
    )
    assert module.last_dev_loss("head") == pytest.approx(loss(module, data, "dev")[0], rel=1e-5)


def test_a_head_that_became_constant_is_named(nano, rows):
    module = new_module(nano, spec(nano, name="fine"), spec(nano, name="flat"))
    features = module.features(collate([MixedResponses(rows, "next_token", 0.15, 0)[0, 0]]))
    module.check_not_constant(features)
    torch.nn.init.zeros_(module.bank.heads["flat"].readout.weight)
    with pytest.raises(UserError, match=r"head flat predicts a constant.*optimizer\.lr"):
        module.check_not_constant(features)


# --- the learning rate


def test_the_rate_rises_over_the_warmup_and_falls_as_a_cosine_to_zero():
    share = cosine_after_warmup(110, 0.09)  # 9.9 steps of warm-up are 10
    assert [share(step) for step in range(10)] == pytest.approx(
        [(step + 1) / 10 for step in range(10)]
    )
    assert share(10) == 1
    assert [share(10 + i) for i in (25, 50, 75)] == pytest.approx(
        [0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]
    )
    assert 0 < share(109) < 1e-3
    assert share(110) == share(1000) == 0
    falling = [share(step) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)
