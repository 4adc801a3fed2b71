"""The page of claims: it follows from the runs, names every item, and costs come from arithmetic."""

import json

import pytest
import yaml

from benchmarks import claims


def test_the_page_is_that_of_the_runs():
    assert claims.main(["--check"]) == 0


def test_every_item_has_a_row_and_counts_add_up():
    text = claims.PAGE.read_text()
    papers = yaml.safe_load(claims.PAPERS.read_text())
    items = [item for paper in papers for item in paper["items"]]
    rows = [line for line in text.splitlines() if line.startswith("| ") and line.count(" | ") == 4]
    assert len(rows) == len(items) + len(papers)  # with the heads of the tables
    counts = [
        int(line.split(" | ")[1].strip(" |")) for line in text.splitlines() if line.split(" | ")[0].strip("| ") in claims.ORDER
    ]
    assert sum(counts) == len(items)


def test_costs_are_bytes_over_bandwidth():
    cost = {"draft_parameters": 7e9, "target_parameters": 7e10, "prompts": 1000, "tokens_per_prompt": 100, "passes": 1}
    hours, gpus = claims.gpu_hours(cost)
    assert hours == pytest.approx(1e5 * 1.4e11 / (3.35e12 * 0.6) / 3600) and gpus == 3


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A function that checks an entry against a small result."""
    columns = [{"name": name, "format": None} for name in ("rule", "gain", "other")]
    rows = [["a", {"value": 0.1, "low": 0.05, "high": 0.15}, 0.02], ["b", {"value": 0.2, "low": -0.1, "high": 0.5}, 0.3]]
    content = {"command": "python measure.py", "tables": [{"key": "all", "columns": columns, "rows": rows}]}
    (tmp_path / "small.json").write_text(json.dumps(content))
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    base = {"claims": ["x"], "says": "more", "result": "small", "table": "all", "column": "gain", "expected": "more"}
    return lambda **entry: claims._measured(base | entry)


def test_a_measured_claim_is_judged_by_its_interval(measured):
    claim, command = measured(row={"rule": "a"}, neutral=0, published=0.05, percent=True)
    assert claim.outcome == "held" and claim.ratio == pytest.approx(2) and command == "python measure.py"
    assert claim.ours == "+10 % [+5, +15]" and claim.published == "+5 %"
    assert measured(row={"rule": "b"}, neutral=0)[0].outcome == "held weakly"
    assert measured(row={"rule": "a"}, neutral=0.12)[0].outcome == "did not hold"
    assert measured(row={"rule": "a"}, against={"rule": "b"})[0].outcome == "did not hold"
    assert measured(row={"rule": "a"}, against_column="other")[0].outcome == "held"
    assert measured(row={"rule": "a"}, neutral=0.2, expected="less")[0].outcome == "held"
