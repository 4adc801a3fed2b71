"""What specheads train prints after it has trained heads, few or very many."""

import pytest

from specheads.commands.train import MOST_SHOWN, _print_heads
from specheads.training.heads.head_training import TrainedHeads


def trained(number, path):
    """Heads whose KL falls with their number, next to a rule without a head."""
    names = [f"head-{index}" for index in range(number)]
    test = {name: {"kl": 1 - index / 10_000, "auroc": 0.5, "brier": 0.2, "ece": 0.1} for index, name in enumerate(names)}
    errors = {name: {"raw": 0.1, "cross_fitted": 0.05} for name in names}
    return TrainedHeads(path / "run" / "heads", names, test | {"draft probability": {"auroc": 0.4}}, errors)


@pytest.mark.parametrize("number", [1, MOST_SHOWN])
def test_few_heads_are_all_shown_in_their_order(number, tmp_path, capsys):
    heads = trained(number, tmp_path)
    _print_heads(heads)
    text = capsys.readouterr().out
    places = [text.index(f"{name} ") for name in heads.names]
    assert places == sorted(places) and "draft probability" in text and "more are in" not in text


def test_of_very_many_heads_the_best_are_shown_and_the_others_counted(tmp_path, capsys):
    heads = trained(1000, tmp_path)
    _print_heads(heads)
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 4 * MOST_SHOWN and "draft probability" in text
    assert "980 more are in" in text and "head-979 " not in text and text.index("head-999 ") < text.index("head-980 ")
