"""The page of claims: it follows from the runs, names every item, and costs come from
arithmetic.
"""

import pytest
import yaml

from benchmarks.papers import page
from benchmarks.render import ROOT

PAGE = ROOT / "docs" / "results.md"


def test_the_page_is_that_of_the_runs():
    assert page.page() == PAGE.read_text()


def test_every_item_has_a_row_and_counts_add_up():
    text = PAGE.read_text()
    papers = yaml.safe_load(page.PAPERS.read_text())
    items = [item for paper in papers for item in paper["items"]]
    rows = [line for line in text.splitlines() if line.startswith("| ") and line.count(" | ") == 4]
    assert len(rows) == len(items) + len(papers)  # with the heads of the tables
    counts = [
        int(line.split(" | ")[1].strip(" |"))
        for line in text.splitlines()
        if line.split(" | ")[0].strip("| ") in page.ORDER
    ]
    assert sum(counts) == len(items)


def test_costs_are_bytes_over_bandwidth():
    cost = {
        "draft_parameters": 7e9,
        "target_parameters": 7e10,
        "prompts": 1000,
        "tokens_per_prompt": 100,
        "passes": 1,
    }
    hours, gpus = page._gpu_hours(cost)
    assert hours == pytest.approx(1e5 * 1.4e11 / (3.35e12 * 0.6) / 3600) and gpus == 3
