"""What specheads train checks before it begins, and prints after it has trained heads, few or very
many.
"""

from dataclasses import replace

import pytest

from specheads.commands.train import _advice, _print_heads
from specheads.replay.information import Information
from specheads.replay.intervals import Interval
from specheads.training.heads.calibrate import Calibrated
from specheads.training.heads.head_training import DevLoss, TrainedHeads


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
        {"free logistic": nats(0.2), "head-0": nats(0.3)},
        {"head-0": Interval((low + high) / 2 if high < 0.2 else 0.1, low, high)},
    )
    return TrainedHeads(
        path / "run" / "heads",
        names,
        test | {"draft probability": {"auroc": 0.4}},
        calibrated=calibrated,
        information=known,
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


def test_heads_are_printed_with_their_metrics_calibration_and_information(tmp_path, capsys):
    lines = printed(trained(2, tmp_path), capsys)
    for row in (
        "head-0 30.0% [29.0%, 31.0%] 0.500 0.100 head-0",
        "head-1 - 0.500 0.100 head-1",
        "logistic regression 20.0% [19.0%, 21.0%] - - -",
        f"heads: {tmp_path}/run/heads",
    ):
        assert row in lines
    assert any("0.400 nats of reducible uncertainty" in line for line in lines)
    without = replace(trained(1, tmp_path), calibrated={}, information=None)
    assert printed(without, capsys)[-1] == f"head: {tmp_path}/run/heads"


@pytest.mark.parametrize(
    ("low", "high", "how"),
    [(0.05, 0.2, "better"), (-0.01, 0.2, "not clearly better")],
)
def test_the_best_head_is_compared_with_the_confidence(tmp_path, capsys, low, high, how):
    text = "\n".join(printed(trained(1, tmp_path, low, high), capsys))
    assert f"The head-0 is {how} than the logistic regression" in text
    assert ("It needs more prompts" in text) == (low <= 0)


def test_a_head_is_called_by_its_kind_next_to_its_folder(tmp_path, capsys):
    heads = trained(2, tmp_path)
    names = {"head-0": "lookahead-d3-r1", "head-1": "specdecpp-d3-r6"}
    test = {names.get(name, name): metrics for name, metrics in heads.test.items()}
    given = replace(heads, names=list(names.values()), test=test, information=None)
    lines = printed(given, capsys)
    assert "look-ahead head - 0.500 0.100 lookahead-d3-r1" in lines
    assert "SpecDec++ head - 0.500 0.100 specdecpp-d3-r6" in lines


@pytest.mark.parametrize(
    ("losses", "warned", "goes_on"),
    [
        ([0.4, 0.4], "", True),
        ([0.4, 0.6], "head-1 predict", True),
        ([0.5, float("nan")], "head-0, head-1 predict", False),
    ],
)
def test_heads_that_learned_nothing_are_named_and_not_built_on(
    tmp_path, monkeypatch, losses, warned, goes_on
):
    monkeypatch.setattr("sys.argv", ["specheads", "train"])
    dev = {f"head-{number}": DevLoss(2, loss, 0.7, 0.5) for number, loss in enumerate(losses)}
    lines = list(_advice(replace(trained(2, tmp_path), dev=dev)))
    assert [line for line in lines if line.startswith("WARNING")] == lines[: bool(warned)]
    assert warned in lines[0]
    assert any(line.startswith("next: specheads evaluate") for line in lines) == goes_on


# --- before a training
