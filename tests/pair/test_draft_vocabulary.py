"""Drafts with an output over some tokens: their logits, their folders, and that the output stays
the target's.
"""

import json
from dataclasses import replace

import pytest
import torch
from fakes import tiny_pair
from safetensors.torch import load_file, save_file
from statistics_helper import chi_square_p_value
from transformers import Gemma2Config, Gemma2ForCausalLM

from specheads import SpeculativeDecoder, UserError, Warp, load_pair
from specheads.decoding.stopping import FixedLength
from specheads.decoding.verification import BlockVerification, TokenVerification
from specheads.pair.draft_vocabulary import (
    borrow_embedding,
    borrows_embedding,
    keep_tokens,
    kept_tokens,
    stored_as,
)
from specheads.pair.initial_draft import TargetLayers
from specheads.pair.language_model import LanguageModel, weightless_model
from specheads.pair.pair import load_draft
from specheads.pair.quantization import lattice_of, on_lattice
from specheads.pair.revisions import set_draft_temperature
from specheads.pair.source import ModelSource
from specheads.training.distill.distill_loss import forward_kl

TOKENS = torch.arange(5, 25)[None]
KEPT = torch.tensor([0, 1, 7, 30, 31, 500, 2047])


def reduced(pair, tokens=KEPT):
    keep_tokens(pair.draft, tokens)
    return replace(pair)


def logits_of(lm, tokens=TOKENS):
    """Logits; on some processors those of fewer columns are other sums."""
    return lm.logits(lm.hidden_states(tokens))


def saved(pair, folder, dtype=torch.float32, **changes):
    """Write a pair's reduced draft as a folder, with some tensors changed; None: left out."""
    pair.draft.save_pretrained(
        folder, state_dict=stored_as(pair.draft, pair.draft.state_dict(), dtype)
    )
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file(
        {name: each for name, each in tensors.items() if each is not None},
        folder / "model.safetensors",
    )
    pair.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def pair():
    return load_pair("nano", dtype="float32")


def test_kept_tokens_have_the_same_logits_and_the_others_none(pair):
    whole = logits_of(pair.draft_lm)
    logits = logits_of(reduced(pair).draft_lm)
    torch.testing.assert_close(logits[..., KEPT], whole[..., KEPT])
    assert kept_tokens(pair.draft).tolist() == KEPT.tolist()
    lacking = torch.ones(2048, dtype=torch.bool).index_fill(0, KEPT, False)
    assert (logits[..., lacking] == -torch.inf).all()
    lm = replace(pair).draft_lm
    assert torch.equal(lm.lacking, lacking) and pair.target_lm.lacking is None
    lm.check()


def test_a_cap_of_logits_does_not_bring_the_others_back():
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config = Gemma2Config(
        vocab_size=11, **sizes, num_key_value_heads=1, final_logit_softcapping=2.0
    )
    model = Gemma2ForCausalLM(config).double().eval()
    whole = logits_of(LanguageModel(model, 11), TOKENS % 11)
    keep_tokens(model, torch.tensor([1, 3, 4]))
    lm = LanguageModel(model, 11)
    lm.check()
    torch.testing.assert_close(logits_of(lm, TOKENS % 11)[..., [1, 3, 4]], whole[..., [1, 3, 4]])
    assert (logits_of(lm, TOKENS % 11) > -torch.inf).sum(-1).unique().tolist() == [3]


def test_the_gradient_reaches_the_kept_rows_alone(pair):
    lm = reduced(pair).draft_lm
    hidden = torch.randn(3, lm.hidden_size, generator=torch.Generator().manual_seed(0))
    lm.output_embedding.requires_grad_(True)
    log_probs = lm.logits(hidden).log_softmax(-1)
    forward_kl(torch.full_like(log_probs, 1 / 2048).log(), log_probs).sum().backward()
    short = (hidden @ lm.output_embedding.weight.detach().T).requires_grad_(True)
    (-(short.log_softmax(-1)) / 2048).sum().backward()
    torch.testing.assert_close(lm.output_embedding.weight.grad, short.grad.T @ hidden)


def test_a_folder_brings_the_same_draft_back(pair, tmp_path):
    folder = saved(reduced(pair), tmp_path / "draft")
    again = load_pair("nano", draft=folder, dtype="float32")
    assert torch.equal(logits_of(again.draft_lm), logits_of(replace(pair).draft_lm))
    assert torch.equal(
        logits_of(load_draft(folder, pair, torch.float32)), logits_of(replace(pair).draft_lm)
    )
    # Of which a user is told how much memory it needs
    shape = weightless_model(ModelSource(folder))
    assert shape.num_parameters() == again.draft.num_parameters() and len(kept_tokens(shape)) == 7
    assert (
        not borrows_embedding(again.draft)
        and json.loads((folder / "config.json").read_text())["draft_vocab_size"] == 7
    )


def test_a_folder_of_others_may_have_its_rows_in_any_order_and_no_embeddings(tmp_path):
    pair = load_pair("nano", dtype="float32", new_draft=TargetLayers(1))
    lm = reduced(pair).draft_lm
    order = torch.tensor([3, 0, 6, 1, 2, 5, 4])
    changes = {
        "lm_head.weight": lm.output_embedding.weight[order].contiguous(),
        "d2t": KEPT[order] - torch.arange(7),
    }
    folder = saved(pair, tmp_path / "draft", **changes, **{"model.embed_tokens.weight": None})
    again = load_pair("nano", draft=folder, dtype="float32")
    theirs = again.target_lm.input_embedding.weight
    mine = again.draft_lm.input_embedding.weight
    assert mine.data_ptr() == theirs.data_ptr() and borrows_embedding(again.draft)
    borrow_embedding(pair.draft, pair.target)
    assert torch.equal(logits_of(again.draft_lm), logits_of(replace(pair).draft_lm))
    alone = load_pair("nano", draft=folder, dtype="float32", only_draft=True)
    assert torch.equal(logits_of(alone.draft_lm), logits_of(again.draft_lm))
    stored = stored_as(again.draft, again.draft.state_dict(), torch.bfloat16)
    assert (
        "model.embed_tokens.weight" not in stored
        and stored["lm_head.weight"].dtype == torch.bfloat16
    )
    assert stored["d2t"].tolist() == (KEPT - torch.arange(7)).tolist()


@pytest.mark.parametrize("vocabulary", [True, False])
def test_weights_in_8_bits_come_back_as_they_were_rounded(tmp_path, vocabulary):
    pair = load_pair("nano", dtype="float32", new_draft=TargetLayers(1))
    draft = reduced(pair).draft if vocabulary else pair.draft
    wide = {name: weight.clone() for name, weight in draft.state_dict().items()}
    draft.config.stored_form = "Q8_0"
    stored = stored_as(draft, wide, torch.bfloat16, "Q8_0")
    draft.save_pretrained(tmp_path, state_dict=dict(stored))  # which it empties
    again = load_pair("nano", draft=tmp_path, dtype="float32").draft
    for name, weight in again.state_dict().items():
        in_bytes = name not in stored and name + ".q" in stored
        assert in_bytes == (wide[name].dim() == 2 and wide[name].shape[1] % 32 == 0)
        assert torch.equal(
            weight,
            lattice_of(wide[name], "Q8_0").weight() if in_bytes else wide[name].bfloat16().float(),
        )
    assert on_lattice(again.get_output_embeddings().weight, "Q8_0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": None}, "has draft_vocab_size=7 in its config, but no d2t in model.safetensors"),
        (
            {"d2t": torch.zeros(6, dtype=torch.long)},
            "do not fit; expected a row for each of 6 different tokens from 0 to 2047",
        ),
        ({"d2t": -torch.arange(7)}, "do not fit"),
    ],
)
def test_a_damaged_folder_is_refused(pair, tmp_path, changes, message):
    folder = saved(reduced(pair), tmp_path / "draft", **changes)
    with pytest.raises(UserError, match=message):
        load_pair("nano", draft=folder, dtype="float32")


def test_embeddings_of_another_size_are_refused(pair, tmp_path):
    folder = saved(reduced(pair), tmp_path / "draft", **{"model.embed_tokens.weight": None})
    with pytest.raises(
        UserError, match=r"those are \(2048, 256\), and it needs \(2048, 160\); use the target that"
    ):
        load_pair("nano", draft=folder)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_decoding_says_what_the_target_says(pair, engine, rows):
    decoder = SpeculativeDecoder(
        reduced(pair, torch.arange(0, 2048, 3)),
        stopping=FixedLength(4),
        warp=Warp(0.0),
        engine=engine,
    )
    prompts = [pair.encode(text) for text in ("import os\n", "def f(x):\n", "x = [1, 2,")]
    outs = (
        [decoder.generate(prompt, 40) for prompt in prompts]
        if rows == 1
        else decoder.generate_batch(prompts, max_batch=rows, max_new_tokens=40)
    )
    for prompt, out in zip(prompts, outs, strict=True):
        given = {
            "attention_mask": torch.ones_like(prompt[None]),
            "max_new_tokens": 40,
            "do_sample": False,
        }
        assert (
            out.tokens.tolist()
            == pair.target.generate(prompt[None], **given)[0, len(prompt) :].tolist()
        )
        assert {token % 3 for done in out.rounds for token in done.tokens[: done.num_accepted]} <= {
            0
        }
    assert sum(done.num_accepted for out in outs for done in out.rounds) > 0


@pytest.mark.parametrize(
    ("verification", "warp", "temperature", "rows"),
    [
        (TokenVerification(), Warp(1.0), 1.0, 1),
        (BlockVerification(), Warp(0.8, top_k=3), 0.7, 30),
        (TokenVerification(), Warp(1.0, top_p=0.7), 1.3, 30),
    ],
    ids=["token", "block, in rows", "token, in rows"],
)
def test_samples_follow_the_targets_distribution(verification, warp, temperature, rows):
    """Two tokens after a prompt, by a chi-square test with a false alarm in a million.

    The draft lacks two of five.
    """
    pair = reduced(tiny_pair(vocab_size=5), torch.tensor([1, 3, 4]))
    set_draft_temperature(pair.draft, temperature)
    decoder = SpeculativeDecoder(
        pair, stopping=FixedLength(2), warp=warp, verification=verification, engine="eager"
    )
    prompt = torch.tensor([1, 3])
    counts = torch.zeros(25, dtype=torch.float64)
    accepted = 0
    for out in decoder.generate_batch(
        [prompt] * 600, max_batch=rows, max_new_tokens=3, seeds=range(600), stop_tokens=()
    ):
        first, second, _ = out.tokens.tolist()
        counts[5 * first + second] += 1
        accepted += out.stats.num_accepted
    with torch.no_grad():
        first = warp(pair.target(prompt[None]).logits[0, -1])
        texts = torch.tensor([[1, 3, token] for token in range(5)])
        pairs = (first[:, None] * warp(pair.target(texts).logits[:, -1])).flatten()
    lacking = counts.view(5, 5)[[0, 2]].sum() + counts.view(5, 5)[[1, 3, 4]][:, [0, 2]].sum()
    assert lacking > 50 and accepted > 50 and not counts[pairs == 0].any()
    assert chi_square_p_value(counts[pairs > 0], pairs[pairs > 0]) > 1e-6
