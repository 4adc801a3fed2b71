"""`specheads generate`, in this process."""

import io
import sys

import pytest
import torch
from feature_drafts import feature_draft

from specheads import Warp, generate_baseline, progress
from specheads.heads.head import AcceptanceHead, HeadConfig, save_head
from specheads.pair.eagle_formats import write_speculators

PROMPT = "def mean(values):\n"
SHORT = ("model=nano", "head=null", "engine=eager", "max_new_tokens=12")


def test_a_greedy_response_is_the_targets(run, nano, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (f'prompt="{PROMPT}"', "warp.temperature=0", "compare=true")
    progress.tell_stages(True)  # as a command does that this process ran before
    code, text, said = run("generate", *SHORT, *words)
    expected = generate_baseline(nano, PROMPT, 12, warp=Warp(0, top_k=50), engine="eager")
    assert code == 0 and text == f"{expected.text}\n"
    assert "FixedLength(num_tokens=5), token verification" in said
    assert "12 tokens, " in said and " for each forward pass of the target; " in said
    assert "target alone: 12 tokens, " in said and said.rstrip().endswith("the same tokens")
    assert not list(tmp_path.iterdir())  # it writes nothing


def test_a_draft_that_reads_its_target_is_a_folder(run, nano, tmp_path):
    draft = feature_draft(nano.target, (1, 3, 4), torch.arange(500), borrows=True)
    write_speculators(draft, tmp_path / "draft", "nano", ["LlamaForCausalLM"], num_tokens=3)
    words = (f'prompt="{PROMPT}"', "warp.temperature=0", f"model.draft={tmp_path / 'draft'}")
    code, text, said = run("generate", *SHORT, *words)
    expected = generate_baseline(nano, PROMPT, 12, warp=Warp(0, top_k=50), engine="eager")
    assert code == 0 and text == f"{expected.text}\n" and "12 tokens, " in said


def test_the_words_of_a_report_choose_rule_head_and_verification(run, nano, tmp_path):
    config = HeadConfig(
        nano.draft_lm.hidden_size,
        0,
        draft=nano.origin("draft"),
        target=nano.origin("target"),
        recommended={"threshold": 0.3, "setting": "this head", "use": "draft_product(0.5)"},
    )
    head = save_head(AcceptanceHead(config), tmp_path / "head")
    words = ["model=nano", "engine=eager", "max_new_tokens=4", "prompt=x", "verification=block"]
    code, _, said = run("generate", *words, f"head={head}")
    assert code == 0 and "HeadThreshold(threshold=0.3, " in said and "block verification" in said
    assert f"the head is {head}; its evaluation recommends draft_product(0.5)" in said
    rule = ["stopping=[draft_product]", "stopping.draft_product.threshold=0.4"]
    code, _, said = run("generate", *words, f"head={head}", *rule)
    assert code == 0 and "DraftProduct(threshold=0.4, " in said and "the head is" not in said


@pytest.mark.parametrize(
    ("speeds", "taken"), [({}, "lookahead"), ({"lookahead": 1.2, "specdecpp": 1.3}, "specdecpp")]
)
def test_of_the_newest_heads_the_best_decodes(run, nano, tmp_path, speeds, taken):
    for name, predicts in (("lookahead", "next_token"), ("specdecpp", "input_token")):
        config = HeadConfig(
            nano.draft_lm.hidden_size,
            0,
            predicts=predicts,
            draft=nano.origin("draft"),
            target=nano.origin("target"),
            recommended={"threshold": 0.3, "speedup": speeds[name]} if speeds else None,
        )
        save_head(AcceptanceHead(config), tmp_path / "head" / "run" / "heads" / name)
    words = ["model=nano", "engine=eager", "max_new_tokens=2", "prompt=x"]
    code, _, said = run("generate", *words, f"paths.outputs={tmp_path}")
    assert code == 0 and f"heads/{taken}" in said


def test_a_prompt_may_have_an_address_with_a_key(run):
    """Nothing is written, so nothing shows it."""
    code, _, said = run("generate", *SHORT, "prompt='http://me:pw@host/?token=1'")
    assert code == 0 and "12 tokens, " in said


def test_prompts_are_asked_for_until_the_input_ends(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("def a():\n\ndef b():\n"))
    code, text, said = run("generate", *SHORT)
    assert code == 0 and said.count("12 tokens, ") == 2 and text.endswith("\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["stopping=[fixed_length,draft_product]"],
            "stopping names 2 rules (fixed_length, draft_product), and a decoder has one; write",
        ),
        (
            ["stopping=[draft_product]"],
            "are several values, and a decoder has one; write for example stopping.draft_product",
        ),
        (
            ["stopping=[head_threshold]", "stopping.head_threshold.threshold=0.5"],
            "HeadThreshold reads a head; give head=<folder> that specheads train exported.",
        ),
        (["max_new_tokens=0"], "max_new_tokens=0 must be a positive integer"),
        (["head=./none"], "there is no head folder"),
    ],
)
def test_a_mistake_is_one_message(run, words, message):
    code, _, error = run("generate", "model=nano", "head=null", "prompt=x", *words)
    assert code == 2 and message in error and "Traceback" not in error
