"""The page of claims: it follows from the runs, names every item, and costs come from arithmetic."""

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


def judged(measured, **entry):
    base = {"claims": ["x"], "says": "more", "expected": "more", "command": "python measure.py"}
    return claims._measured(base | {"measured": measured} | entry)


def test_a_measured_claim_is_judged_by_its_interval():
    claim, command = judged([0.05, 0.1, 0.15], neutral=0, published=0.05, percent=True)
    assert claim.outcome == "held" and claim.ratio == pytest.approx(2) and command == "python measure.py"
    assert claim.ours == "+10 % [+5, +15]" and claim.published == "+5 %"
    assert judged([-0.1, 0.2, 0.5], neutral=0)[0].outcome == "held weakly"
    assert judged([0.05, 0.1, 0.15], neutral=0.12)[0].outcome == "did not hold"
    assert judged([0.05, 0.1, 0.15], against=0.2)[0].outcome == "did not hold"
    assert judged([0.05, 0.1, 0.15], neutral=0.2, expected="less")[0].outcome == "held"
    assert judged(0.3, against=0.1)[0].ours == "0.3 against 0.1"
