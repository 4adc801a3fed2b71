"""The benchmark of rules: rows of reports of several seeds, rules without a head once."""

import json
from dataclasses import asdict

import pytest
from report_example import report_example

from benchmarks import rules
from benchmarks.results import Table


@pytest.fixture
def report():
    return json.loads(json.dumps(asdict(report_example())))


def test_rows_are_means_over_seeds_within_the_limits_of_all(report):
    other = json.loads(json.dumps(report))
    (tested, *_) = [data for data in other["data_sets"] if data["role"] == "test"]
    for winner in tested["winners"]:
        winner["speedup"] = {name: value + 1 for name, value in winner["speedup"].items()}
    rows = list(rules._rows_of({"head": [report, other], "the paper's": [report, report]}))
    Table("rules", "", rules.COLUMNS, [["nano", "sampled", *row] for row in rows])  # every row fits
    names = [(row[0], row[1]) for row in rows]
    assert len(names) == len(set(names)) and {row[0] for row in rows} == {
        data["name"] for data in report["data_sets"] if data["role"] == "test"
    }
    heads = [name for _, name in names if name.endswith(", the paper's")]
    assert heads and all(name.startswith("head") for name in heads)
    winners = next(data for data in report["data_sets"] if data["role"] == "test")["winners"]
    winner = next(each for each in winners if (each["family"], each["ratio"]) == ("fixed_length", "5"))
    fixed = next(row for row in rows if row[1] == "fixed length")
    assert fixed[2] is None and fixed[3]["value"] == pytest.approx(winner["speedup"]["value"] + 0.5)
    assert fixed[3]["low"] == winner["speedup"]["low"] and fixed[3]["high"] == pytest.approx(winner["speedup"]["high"] + 1)
    assert fixed[12]["value"] == pytest.approx(winner["gain"]["value"] - 1)


def test_a_head_is_trained_once_and_evaluated_with_its_decoding(report, tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    outputs, asked = tmp_path / "outputs/rules/nano/greedy/the_papers/1", []

    def run(*words):
        asked.append(words)
        made = outputs / ("evaluate/2/report.json" if words[0] == "evaluate" else "head/1/heads/a/config.json")
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(report))

    monkeypatch.setattr(rules, "run", run)
    for _ in range(2):
        rules.evaluated("nano", "greedy/the paper's/1", 1, ("loss.reject_weight=6.0", *rules.GREEDY), ["split=final"])
    assert [words[0] for words in asked] == ["train", "evaluate", "evaluate"]
    assert asked[0][-3:] == ("loss.reject_weight=6.0", *rules.GREEDY) and "seed=1" in asked[1]
    assert "warp.temperature=0" in asked[1] and "loss.reject_weight=6.0" not in asked[1] and asked[1][-1] == "split=final"
