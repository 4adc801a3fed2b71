"""The pairs that ship with the package: their sizes, tokens, losses, and the records of their
training.
"""

import json
from pathlib import Path

import pytest
import torch

import specheads
from specheads import load_pair
from specheads.pair.revisions import content_of
from specheads.prompts.sources import standard_library

PACKAGE = Path(specheads.__file__).parent


@pytest.fixture(scope="module")
def pairs(nano):
    return {"nano": nano, "mini": load_pair("mini", dtype="float32")}


@pytest.mark.parametrize(
    ("name", "parameters", "size"),
    [("nano", 6_000_000, 14_000_000), ("mini", 20_000_000, 40_000_000)],
)
def test_they_are_small_and_in_16_bits(pairs, name, parameters, size):
    pair = pairs[name]
    assert pair.target.num_parameters() <= parameters and pair.draft.num_parameters() <= 1_000_000
    files = [PACKAGE / name / role / "model.safetensors" for role in ("target", "draft")]
    assert sum(path.stat().st_size for path in files) <= size
    assert 2048 <= pair.vocab_size <= 4096 and pair.window >= 2048


def test_the_tokenizer_restores_every_text(pairs):
    text = "def f(x):\n\tif x > 1_000:\n        return 'naïve 中文 🙂'\n\n\n"
    nano = pairs["nano"]
    mini = pairs["mini"]
    ids = nano.tokenizer(text)["input_ids"]
    assert ids[0] == nano.tokenizer.bos_token_id and ids.count(ids[0]) == 1
    assert nano.decode(ids) == text and mini.tokenizer(text)["input_ids"] == ids


def test_prompt_and_body_are_the_same_tokens_apart_as_together(nano):
    for function in standard_library("dev")[:50]:
        together = nano.tokenizer(function.prompt + function.body)["input_ids"]
        body = nano.tokenizer(function.body, add_special_tokens=False)["input_ids"]
        assert together == nano.tokenizer(function.prompt)["input_ids"] + body


@pytest.mark.parametrize("name", ["nano", "mini"])
def test_the_card_and_the_notice_agree_with_the_record_of_the_training(pairs, name):
    folder = PACKAGE / name
    record = json.loads((folder / "training.json").read_text())
    card = (folder / "README.md").read_text()
    notice = Path("NOTICE")
    for role in ("target", "draft"):
        assert f"{record[role]['parameters']:,}" in card
        assert record[role]["parameters"] == getattr(pairs[name], role).num_parameters()
        if name == "mini":
            assert record[role]["revision"] == content_of(folder / role)
    for source in record["sources"]:
        assert source["licence"] and f"| {source['name']} | {source['version']} |" in card
        assert name == "nano" or f"{source['name']} {source['version']}" in notice.read_text()
    assert "at commit 1a2ca02" in card


def test_each_target_is_better_than_its_draft_on_held_out_functions(pairs):
    functions = standard_library("test")[:40]
    nano, nano_draft, mini, mini_draft = (
        _loss(pairs[name], role, functions)
        for name in ("nano", "mini")
        for role in ("target", "draft")
    )
    assert mini < nano < min(nano_draft, mini_draft)
    assert nano < nano_draft - 0.3 and nano_draft < 4.5  # untrained: log(2048) = 7.6


@torch.no_grad()
def _loss(pair, role, functions):
    """Return the mean loss of the functions' bodies, in nats per token."""
    model = getattr(pair, role)
    total = 0.0
    count = 0
    for function in functions:
        start = len(pair.tokenizer(function.prompt)["input_ids"])
        ids = torch.tensor([pair.tokenizer(function.prompt + function.body)["input_ids"]])
        log_probs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        total -= float(log_probs.gather(1, ids[0, start:, None]).sum())
        count += ids.shape[1] - start
    return total / count
