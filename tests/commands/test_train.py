"""What specheads train prints after it has trained heads, few or very many."""

import pytest

from specheads.commands.train import MOST_SHOWN, _print_heads
from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import Information
from specheads.training.heads.calibrate import Calibrated
from specheads.training.heads.head_training import TrainedHeads


def trained(number, path, low=0.05, high=0.2):
    """Heads whose KL falls with their number, next to a rule without a head."""
    names = [f"head-{index}" for index in range(number)]
    test = {name: {"kl": 1 - index / 10_000, "auroc": 0.5, "brier": 0.2, "ece": 0.1} for index, name in enumerate(names)}
    errors = {"raw": 0.1, "cross_fitted": 0.05}
    calibrated = {name: Calibrated(errors, errors, "Platt", used=name.endswith("0")) for name in names}
    known = Information(
        9,
        nats(0.6),
        nats(0.2),
        nats(0.4),
        {"head-0": nats(0.3)},
        {"head-0": Interval((low + high) / 2 if high < 0.2 else 0.1, low, high)},
    )
    return TrainedHeads(path / "run" / "heads", names, test | {"draft probability": {"auroc": 0.4}}, calibrated, known)


def nats(value):
    return Interval(value, value - 0.01, value + 0.01)


@pytest.mark.parametrize("number", [1, MOST_SHOWN])
def test_few_heads_are_all_shown_in_their_order(number, tmp_path, capsys):
    heads = trained(number, tmp_path)
    _print_heads(heads)
    text = capsys.readouterr().out
    places = [text.index(f"{name} ") for name in heads.names]
    assert places == sorted(places) and "draft probability" in text and "more are in" not in text
    assert "0.600 nats of uncertainty, 0.200 noise, 0.400 knowable" in text and "head-0 explains 30.0%" in text
    assert "head-0, the best head, is better than the free logistic: +10.0% [+5.0%, +20.0%] of that" in text
    assert "it needs more prompts" not in text


@pytest.mark.parametrize(("low", "high", "how"), [(-0.01, 0.2, "neither clearly better nor worse"), (-0.2, -0.1, "worse")])
def test_a_head_that_knows_no_more_than_the_confidence_is_said_to(tmp_path, capsys, low, high, how):
    _print_heads(trained(1, tmp_path, low, high))
    text = capsys.readouterr().out
    assert f"is {how} than the free logistic: " in text and "it needs more prompts (data.num_train=) or epochs" in text


def test_of_very_many_heads_the_best_are_shown_and_the_others_counted(tmp_path, capsys):
    heads = trained(1000, tmp_path)
    _print_heads(heads)
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 4 * MOST_SHOWN and "draft probability" in text
    assert "980 more are in" in text and "head-979 " not in text and text.index("head-999 ") < text.index("head-980 ")
