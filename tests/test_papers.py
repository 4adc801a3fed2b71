"""The inventory of the papers: complete items, and names that exist in specheads."""

import importlib
from numbers import Real
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from specheads.papers.reproduction.settings import METRICS as MEASURED
from specheads.papers.reproduction.settings import Method

from specheads.commands.compose import command_config
from specheads.pair.config import config_folder

ROOT = Path(__file__).parents[1]
PAPERS = yaml.safe_load((ROOT / "benchmarks/papers.yaml").read_text("utf-8"))
ITEMS = [item for paper in PAPERS for item in paper["items"]]
EACH = pytest.mark.parametrize("item", ITEMS, ids=[item["id"] for item in ITEMS])
PAPER_FIELDS = {"key", "title", "authors", "arxiv", "venue", "seen", "items"}
ITEM_FIELDS = {"id", "place", "says", "published", "how"}
# What each way of checking asks for, and what it may have besides.
ASKED = {
    "theory": {"computes"},
    "experiment": {"needs"},
    "large": {"cost"},
    "text": set(),
    "unavailable": set(),
}
ALLOWED = {"seen_in", "unverified", "note"}
NEEDS = {"drafting", "stopping", "verification", "warp", "settings", "metrics", "compares"}
METRICS = {
    *(
        "tokens_per_second",
        "speed_up",
        "seconds",
        "block_efficiency",
        "discard_rate",
        "verification_rate",
        "acceptance_rate",
    ),
    *("graph_success", *MEASURED),
}
COST = {"draft_parameters", "target_parameters", "prompts", "tokens_per_prompt", "passes"}


def of(how):
    return [pytest.param(item, id=item["id"]) for item in ITEMS if item["how"] == how]


def choices(group):
    return {path.stem for path in (config_folder() / group).glob("*.yaml")}


def keys_of(value):
    """Yield the keys of nested mappings, the outer ones first."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_of(inner)


def as_list(value):
    return value if isinstance(value, list) else [value]


CONFIG_KEYS = {
    key
    for path in config_folder().rglob("*.yaml")
    for key in keys_of(yaml.safe_load(path.read_text("utf-8")))
}
CONFIG_KEYS |= {
    key
    for name in ("train", "distill", "evaluate")
    for key in keys_of(OmegaConf.to_container(command_config(name)))
}
CONFIG_KEYS |= set(Method.model_fields)


def test_the_five_papers_are_there_with_all_fields():
    assert [paper["key"] for paper in PAPERS] == ["specdecpp", "block", "mjsd", "gsd", "theory"]
    for paper in PAPERS:
        assert set(paper) == PAPER_FIELDS
        assert all(
            isinstance(paper[name], str) and paper[name] for name in PAPER_FIELDS - {"items"}
        )
        assert all(item["id"].startswith(f"{paper['key']}_") for item in paper["items"])


def test_ids_are_unique_and_in_snake_case():
    ids = [item["id"] for item in ITEMS]
    assert len(set(ids)) == len(ids)
    assert all(name.isidentifier() and name == name.lower() for name in ids)


@EACH
def test_an_item_says_what_is_claimed_and_how_it_is_checked(item):
    asked = ASKED[item["how"]]
    costed = {"cost"} if item["how"] == "experiment" else set()
    assert ITEM_FIELDS | asked <= set(item) <= ITEM_FIELDS | asked | ALLOWED | costed
    assert all(isinstance(item[name], str) and item[name] for name in ("place", "says"))
    assert item["says"].endswith(".")
    assert item["published"] is None or (isinstance(item["published"], str) and item["published"])


@EACH
def test_numbers_are_published_only_where_they_were_read(item):
    if item.get("unverified"):
        assert item["published"] is None and "seen_in" not in item
    else:
        assert "unverified" not in item
        assert item["seen_in"] in {"text", "abstract", "repository", "secondary"}


@pytest.mark.parametrize("item", of("theory"))
def test_what_computes_a_theorem_exists(item):
    assert item["computes"]
    for name in item["computes"]:
        module, attribute = name.rsplit(".", 1)
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("item", of("experiment"))
def test_an_experiment_names_choices_and_settings_of_specheads(item):
    needs = item["needs"]
    assert NEEDS <= set(needs) <= NEEDS | {"training"}
    for group in ("drafting", "stopping", "verification"):
        assert needs[group] and set(needs[group]) <= choices(group)
    assert set(needs.get("training", [])) <= choices("experiment")
    assert set(needs["metrics"]) <= METRICS and needs["metrics"]
    assert "temperature" in needs["warp"] and set(needs["warp"]) <= {
        "temperature",
        "top_k",
        "top_p",
    }
    assert all(
        isinstance(value, Real) for setting in needs["warp"].values() for value in as_list(setting)
    )
    assert {key.rsplit(".", 1)[-1] for key in needs["settings"]} <= CONFIG_KEYS


@pytest.mark.parametrize(
    "item", [pytest.param(item, id=item["id"]) for item in ITEMS if "cost" in item]
)
def test_the_cost_of_a_published_pair_can_be_computed(item):
    cost = item["cost"]
    numbers = {name: value for name, value in cost.items() if name != "assumed"}
    assert COST <= set(numbers) <= COST | {"training_tokens"}
    assert all(isinstance(value, Real) and value > 0 for value in numbers.values())
    assert set(cost.get("assumed", [])) <= set(numbers)
    assert numbers["draft_parameters"] < numbers["target_parameters"]
