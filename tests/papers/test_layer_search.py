"""Which layers a self-drafting target can do without."""

import json
from types import SimpleNamespace

import pytest
from fakes import CountingTokenizer, tiny_llama

from specheads.commands import papers
from specheads.commands.compose import command_config
from specheads.evaluation.prompt_sets import PromptSet
from specheads.pair.pair import Pair
from specheads.papers import layer_skip
from specheads.papers.layer_skip import _cost_without, best_length
from specheads.prompts.prompt import Prompt


@pytest.fixture
def pair():
    """A target whose layers 1 and 3 add next to nothing."""
    target = tiny_llama(9, seed=1, scale=2.0, layers=4)
    for number in (1, 3):
        for part in (target.model.layers[number].self_attn.o_proj, target.model.layers[number].mlp.down_proj):
            part.weight.mul_(1e-3)
    return Pair(target, tiny_llama(9, seed=2), CountingTokenizer(9), "tiny", "tiny-target", "r1", "tiny-draft", "r2")


def test_the_search_skips_layers_that_add_nothing(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(papers, "load_configured_pair", lambda cfg: pair)
    dev = PromptSet("dev", "dev", [(Prompt("a", "dev", "a"), [0, 1, 2]), (Prompt("b", "dev", "b"), [3, 4])])
    monkeypatch.setattr(papers, "PromptSets", lambda data, pair, heads: SimpleNamespace(dev=dev))
    cfg = command_config(
        "layer_search", ["model=nano", f"paths.run={tmp_path}", "max_new_tokens=20", "most_skipped=0.8", "engine=eager"]
    )
    papers.layer_search.run(cfg)
    sets = json.loads((tmp_path / "layer_search.json").read_text())
    assert sets[0]["skipped"] == [1, 3] and sets[0]["acceptance"] > 0.98
    assert sets[0]["cost"] == pytest.approx(_cost_without(pair, [1, 3])) and 0.3 < sets[0]["cost"] < 0.7
    assert sorted(len(each["skipped"]) for each in sets) == [1, 2, 3]
    assert "'drafting.skipped=[1,3]'" in capsys.readouterr().out
    # What was tried is not tried again.
    monkeypatch.setattr(layer_skip, "is_resumed", lambda folder: True)
    monkeypatch.setattr(layer_skip, "without_layers", lambda *args: pytest.fail("tried again"))
    papers.layer_search.run(cfg)
    assert json.loads((tmp_path / "layer_search.json").read_text()) == sets


def test_the_best_length_is_where_the_speed_is_largest():
    assert best_length(0.0, 0.1, 20)[0] == 1 and best_length(1.0, 0.1, 30) == (30, pytest.approx(31 / 4))
    lengths = [best_length(rate, 0.1, 100)[0] for rate in (0.3, 0.5, 0.7, 0.9)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert best_length(0.7, 0.05, 100)[0] >= best_length(0.7, 0.2, 100)[0]
    speeds = [(1 - 0.8 ** (count + 1)) / 0.2 / (1 + count / 7) for count in range(30)]
    best, speed = best_length(0.8, 1 / 7, 100)
    assert speed == pytest.approx(speeds[best]) == max(speeds)
