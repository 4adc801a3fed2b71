"""The page of claims: it follows from the runs, names every item, and costs are computed."""

import importlib

import pytest
import yaml

from benchmarks.papers import page
from benchmarks.render import ROOT
from specheads.pair.config import config_folder

PAGE = ROOT / "docs" / "results.md"
PAPERS = yaml.safe_load(page.PAPERS.read_text())
ITEMS = [item for paper in PAPERS for item in paper["items"]]


def test_the_page_is_that_of_the_runs():
    assert page.page() == PAGE.read_text()


def test_every_item_has_a_row_and_counts_add_up():
    lines = PAGE.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and line.count(" | ") == 4]
    assert len(rows) == len(ITEMS) + len(PAPERS)  # with the heads of the tables
    counted = 0
    for line in lines:
        if line.split(" | ")[0].strip("| ") in page.ORDER:
            counted += int(line.split(" | ")[1].strip(" |"))
    assert counted == len(ITEMS)
    assert len({item["id"] for item in ITEMS}) == len(ITEMS)


@pytest.mark.parametrize("how", ["theory", "experiment", "large", "unavailable", "text"])
def test_items_name_what_exists(how):
    """Functions that compute a theorem, choices of an experiment, sources of published numbers."""
    items = [item for item in ITEMS if item["how"] == how]
    assert items
    for item in items:
        assert item["published"] is None or item["seen_in"], item["id"]
        for name in item.get("computes", ()):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name
        for group in ("drafting", "stopping", "verification"):
            for name in item.get("needs", {}).get(group, ()):
                assert (config_folder() / group / f"{name}.yaml").exists(), (item["id"], name)


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
