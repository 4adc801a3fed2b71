import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specheads import load_pair
from specheads.embedded import corpus
from specheads.embedded.card import card
from specheads.embedded.corpus import is_permissive
from specheads.embedded.training import response_loss
from specheads.mini import build
from specheads.mini.build import MINI
from specheads.revisions import folder_revision

FOLDER = Path(build.__file__).parent


@pytest.fixture(scope="module")
def mini():
    return load_pair("mini", dtype="float32")


def test_the_shipped_pair_is_small_and_in_16_bits(mini):
    assert 12_000_000 <= mini.target.num_parameters() <= 20_000_000
    assert mini.draft.num_parameters() <= 1_000_000
    files = [FOLDER / role / "model.safetensors" for role in ("target", "draft")]
    assert sum(file.stat().st_size for file in files) <= 40_000_000


def test_it_reads_text_as_nano_does(mini, nano):
    text = "def f(x):\n    return x ** 2\n"
    assert AutoTokenizer.from_pretrained(MINI.tokenizer)(text)["input_ids"] == nano.tokenizer(text)["input_ids"]
    assert mini.tokenizer(text)["input_ids"] == nano.tokenizer(text)["input_ids"]


def test_its_text_is_pinned_and_permissive():
    rows = json.loads(MINI.manifest.read_text())
    assert rows[0]["name"] == "Python standard library"
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row["functions"] > 0 and len(row["sha256"]) == 64 and is_permissive(row["licence"])
    assert sum(row["functions"] for row in rows) > 50_000


def test_the_card_and_the_notice_are_made_of_the_recorded_training():
    results = json.loads((FOLDER / "training.json").read_text())
    assert (FOLDER / "README.md").read_text() == card(MINI, results)
    notice = (FOLDER.parents[1] / "NOTICE").read_text()
    assert results["sources"] == json.loads(MINI.manifest.read_text())
    assert all(f"{row['name']} {row['version']}" in notice for row in results["sources"])


def test_the_recipe_is_that_of_the_shipped_weights(mini):
    results = json.loads((FOLDER / "training.json").read_text())
    assert results["target"]["recipe"]["steps"] == MINI.recipes["target"].steps
    revisions = {role: folder_revision(FOLDER / role) for role in ("target", "draft")}
    assert {role: results[role]["revision"] for role in revisions} == revisions
    assert results["draft"]["distilled"]["target"] == {"id": mini.target_id, "revision": revisions["target"]}
    for role, model in (("target", mini.target), ("draft", mini.draft)):
        expected = {name: value.shape for name, value in MINI.new_model(role, 0).state_dict().items()}
        assert {name: value.shape for name, value in model.state_dict().items()} == expected


def test_the_target_is_better_than_nanos_on_held_out_functions(mini, nano):
    functions = list(corpus.standard_library("test"))[:40]
    target, nanos, draft = (response_loss(model, nano.tokenizer, functions) for model in (mini.target, nano.target, mini.draft))
    assert target < nanos < draft
