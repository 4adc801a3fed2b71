"""What specheads train checks before it begins, and prints after it has trained heads, few or very
many.
"""

from dataclasses import replace

import pytest

from specheads.commands.compose import command_config, settings_of
from specheads.commands.train import MOST_SHOWN, _checked_settings, _print_heads
from specheads.errors import UserError
from specheads.replay.information import Information
from specheads.replay.intervals import Interval
from specheads.training.heads.calibrate import Calibrated
from specheads.training.heads.head_training import TrainedHeads
from specheads.training.heads.settings import HeadTraining


def trained(number, path, low=0.05, high=0.2):
    """Heads whose KL falls with their number, next to a rule without a head."""
    names = [f"head-{index}" for index in range(number)]
    test = {
        name: {"kl": 1 - index / 10_000, "auroc": 0.5, "brier": 0.2, "ece": 0.1}
        for index, name in enumerate(names)
    }
    eces = {"raw": 0.1, "cross_fitted": 0.05}
    losses = {"raw": 0.7, "cross_fitted": 0.6}
    calibrated = {
        name: Calibrated(eces, losses, "Platt", used=name.endswith("0")) for name in names
    }
    known = Information(
        9,
        nats(0.6),
        nats(0.2),
        nats(0.4),
        {"head-0": nats(0.3)},
        {"head-0": Interval((low + high) / 2 if high < 0.2 else 0.1, low, high)},
    )
    return TrainedHeads(
        path / "run" / "heads",
        names,
        test | {"draft probability": {"auroc": 0.4}},
        calibrated,
        known,
    )


def nats(value):
    return Interval(value, value - 0.01, value + 0.01)


def printed(heads, capsys):
    _print_heads(heads)
    return [
        " ".join(line.replace("─", "").split())
        for line in capsys.readouterr().out.splitlines()
        if line.strip(" ─")
    ]


def test_what_is_printed_word_by_word(tmp_path, capsys):
    assert printed(trained(2, tmp_path), capsys) == [
        "on held-out prompts AUROC KL Brier ECE",
        "head-0 0.500 1.000 0.200 0.100",
        "head-1 0.500 1.000 0.200 0.100",
        "draft probability 0.400 - - -",
        "on dev prompts ECE after log loss after calibration",
        "head-0 0.1000 0.0500 0.7000 0.6000 Platt",
        "head-1 0.1000 0.0500 0.7000 0.6000 none",
        (
            "after: calibrated on one half of the prompts, measured on the other; used where that"
            " is clearly better"
        ),
        "acceptance of a drafted token: 0.600 nats of uncertainty, 0.200 irreducible, 0.400 reducible",
        "head-0 explains 30.0% [29.0%, 31.0%] of that",
        "head-0, the best head, is better than the free logistic: +10.0% [+5.0%, +20.0%] of that",
        f"heads: {tmp_path}/run/heads",
    ]
    without = replace(trained(1, tmp_path), calibrated={}, information=None)
    assert printed(without, capsys)[-2:] == [
        "draft probability 0.400 - - -",
        f"head: {tmp_path}/run/heads",
    ]


def test_the_best_of_several_heads_is_compared_and_all_are_ranked(tmp_path, capsys):
    known = trained(1, tmp_path).information
    few = {"free logistic": nats(0.25), "low": nats(0.2), "high": nats(0.4)}
    over = {"low": Interval(-0.05, -0.06, -0.04), "high": Interval(0.15, 0.0, 0.3)}
    lines = printed(
        replace(
            trained(1, tmp_path), information=replace(known, explained=few, over_logistic=over)
        ),
        capsys,
    )
    assert lines[-6:-1] == [
        "high explains 40.0% [39.0%, 41.0%] of that",
        "free logistic explains 25.0% [24.0%, 26.0%] of that",
        "low explains 20.0% [19.0%, 21.0%] of that",
        (
            "high, the best head, is neither clearly better nor worse than the free logistic:"
            " +15.0% [+0.0%, +30.0%] of that"
        ),
        (
            "it needs more prompts (data.num_train=) or epochs (trainer.max_epochs=); head=null"
            " evaluates rules without one"
        ),
    ]
    zero = replace(known, over_logistic={"low": Interval(-0.1, -0.2, 0.0)})
    assert (
        "is neither clearly" in printed(replace(trained(1, tmp_path), information=zero), capsys)[-3]
    )
    many = replace(
        known, explained={f"{number}": nats(number / 100) for number in range(30)}, over_logistic={}
    )
    lines = printed(replace(trained(1, tmp_path), information=many), capsys)
    assert [line.split()[0] for line in lines[-21:-1]] == [
        f"{number}" for number in range(29, 9, -1)
    ]


def test_of_very_many_heads_the_best_are_shown_and_the_others_counted(tmp_path, capsys):
    heads = trained(1000, tmp_path)
    _print_heads(heads)
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 4 * MOST_SHOWN and "draft probability" in text
    more = f"the 20 heads of the lowest KL; 980 more are in {tmp_path}/run/test.json"
    assert (
        more in text
        and "head-979 " not in text
        and text.index("head-999 ") < text.index("head-980 ")
    )


# --- before a training


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_a_training_needs_prompts_of_every_split(split):
    with pytest.raises(UserError) as error:
        _checked_settings(
            HeadTraining, command_config("train", ["model=nano", f"data.num_{split}=0"])
        )
    assert (
        str(error.value)
        == f"data.num_{split}=0 must be a positive integer; training needs prompts of every split."
    )


def test_settings_are_those_of_the_command_line_and_fit_its_processes():
    given = command_config("train", ["model=nano", "heads=lookahead", "loader.batch_size=6"])
    assert (
        _checked_settings(HeadTraining, given) == settings_of(HeadTraining, given)
        and given.heads == "lookahead"
    )
    with pytest.raises(
        UserError, match="loader.batch_size=6 rows cannot be split over 4 processes"
    ):
        _checked_settings(
            HeadTraining,
            command_config("train", ["model=nano", "loader.batch_size=6", "trainer.devices=4"]),
        )
    with pytest.raises(
        UserError, match="model.quantization=int8"
    ):  # a mistake in what makes the data
        _checked_settings(
            HeadTraining,
            command_config("train", ["model=nano", "model.quantization=int8", "runner=vllm"]),
        )
