"""Drafts whose vocabulary differs from the target's at the edge: what they know, and that the
output stays the target's.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from fakes import tiny_pair
from statistics_helper import chi_square_p_value
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads import SpeculativeDecoder, UserError, Warp, load_pair
from specheads.decoding.stopping import FixedLength
from specheads.evaluation.probe.prediction import agreement
from specheads.pair.draft_vocabulary import borrow_embedding, keep_tokens
from specheads.pair.language_model import load_tokenizer
from specheads.pair.pair import _fit_to_vocabulary, known_tokens
from specheads.pair.revisions import resolve
from specheads.prompts.prompt import ResponseLimits, encode_prompts
from specheads.prompts.sources import NanoSource
from specheads.replay.head_scores import record_sets
from specheads.replay.recording import Recorder
from specheads.replay.response_tree import RecordSettings


def tokenizer_with(*tokens):
    tokenizer = load_tokenizer("embedded:nano", None)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    return tokenizer


def test_equal_vocabularies_and_more_tokens_of_the_draft_need_nothing():
    assert known_tokens(tokenizer_with(), tokenizer_with(), "a", "b") is None
    assert known_tokens(tokenizer_with("<|tool|>"), tokenizer_with(), "a", "b") is None


def test_a_draft_lacks_added_tokens_of_the_target_and_those_whose_ids_it_uses_for_others():
    known = known_tokens(
        tokenizer_with("<|a|>"), tokenizer_with("<|b|>", "<|c|>"), "draft", "target"
    )
    assert len(known) == 2050 and known.nonzero().squeeze(1).tolist() == list(range(2048))


def test_added_tokens_in_another_order_are_other_tokenizers():
    with pytest.raises(
        UserError, match=r"different tokenizers \(2 tokens differ, for example '<\|a\|>'\)"
    ):
        known_tokens(tokenizer_with("<|a|>", "<|b|>"), tokenizer_with("<|b|>", "<|a|>"), "a", "b")


def test_a_token_of_the_vocabulary_itself_must_be_in_both():
    class Without:
        """Nano's tokenizer without a usual token."""

        def __init__(self):
            self.inner = tokenizer_with()

        def get_vocab(self):
            return {token: place for token, place in self.inner.get_vocab().items() if place != 700}

        def get_added_vocab(self):
            return self.inner.get_added_vocab()

    with pytest.raises(
        UserError, match="1 tokens differ.*which may lack added tokens of it, or have others"
    ):
        known_tokens(Without(), tokenizer_with(), "a", "b")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Nano, whose target has learned of two more tokens, and its draft."""
    folders = {role: tmp_path_factory.mktemp(role) for role in ("target", "draft")}
    shutil.copytree(resolve("embedded:nano/draft"), folders["draft"], dirs_exist_ok=True)
    AutoTokenizer.from_pretrained(resolve("embedded:nano")).save_pretrained(folders["draft"])
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(
        resolve("embedded:nano/target"), dtype=torch.float32
    )
    target.resize_token_embeddings(2050, mean_resizing=False)
    # Tokens that the target likes: about as likely as an end of line.
    end = load_tokenizer("embedded:nano", None)("\n", add_special_tokens=False)["input_ids"][0]
    weights = {
        id(each.weight): each.weight
        for each in (target.get_input_embeddings(), target.get_output_embeddings())
    }
    with torch.no_grad():
        for weight in weights.values():
            weight[2048:] = weight[end] * torch.tensor([[0.8], [1.1]])
    target.save_pretrained(folders["target"])
    tokenizer_with("<|b|>", "<|c|>").save_pretrained(folders["target"])
    return load_pair(draft=folders["draft"], target=folders["target"], dtype="float32")


def test_such_a_pair_is_loaded_over_the_targets_vocabulary(pair, nano):
    assert pair.vocab_size == 2050 and (~pair.known_to_draft).nonzero().squeeze(1).tolist() == [
        2048,
        2049,
    ]
    tokens = torch.arange(5, 25)[None]
    logits = pair.draft_lm.logits(pair.draft_lm.hidden_states(tokens))
    expected = nano.draft_lm.logits(nano.draft_lm.hidden_states(tokens))
    torch.testing.assert_close(logits[..., :2048], expected)
    assert (logits[..., 2048:] == -torch.inf).all()
    assert pair.draft_revision == nano.draft_revision
    read = pair.draft_lm.hidden_states(torch.tensor([[5, 2049]]))  # a token that it does not know
    assert torch.isfinite(read).all()


@pytest.mark.parametrize("resized", [False, True])
def test_a_token_that_models_were_not_resized_for_is_never_written(tmp_path, nano, resized):
    for role in ("target", "draft"):
        shutil.copytree(resolve(f"embedded:nano/{role}"), tmp_path / role)
        tokenizer_with("<|pad|>").save_pretrained(tmp_path / role)
    if resized:
        target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
        target.resize_token_embeddings(2049)
        target.save_pretrained(tmp_path / "target")
    pair = load_pair(draft=tmp_path / "draft", target=tmp_path / "target", dtype="float32")
    assert pair.vocab_size == 2048 + resized
    assert (pair.known_to_draft is None) != resized and (
        not resized or pair.known_to_draft.tolist() == [True] * 2048 + [False]
    )
    texts = ("import os\n", "<|pad|>def f(x):\n")
    stopping = FixedLength(4)
    decoders = [
        SpeculativeDecoder(each, stopping=stopping, warp=Warp(0.0), engine="eager")
        for each in (pair, nano)
    ]
    first, same = (decoder.generate(texts[0], 20).tokens.tolist() for decoder in decoders)
    assert resized or first == same
    for encode in (pair.encode, pair.encode_instruction):
        if resized:
            assert 2048 in encode(texts[1])
        else:
            with pytest.raises(
                UserError,
                match=(
                    r"a prompt holds the token '<\|pad\|>', which .*target does not know; take"
                    r" it out"
                ),
            ):
                encode(texts[1])


def test_samples_follow_the_targets_distribution_on_tokens_that_the_draft_does_not_know():
    """One token after each of many prompts, by a chi-square test with a false alarm in a
    million.
    """
    known = torch.tensor([True, True, False, True, False])
    pair = replace(tiny_pair(vocab_size=5), known_to_draft=known)
    _fit_to_vocabulary(pair.draft, known)
    decoder = SpeculativeDecoder(pair, stopping=FixedLength(2), warp=Warp(1.0))
    prompt = torch.tensor([1, 3])
    counts = torch.zeros(25, dtype=torch.float64)
    for seed in range(600):
        first, second = decoder.generate(prompt, 2, seed=seed, stop_tokens=()).tokens.tolist()
        counts[5 * first + second] += 1
    with torch.no_grad():
        first = pair.target(prompt[None]).logits[0, -1].double().softmax(-1)
        texts = torch.tensor([[1, 3, token] for token in range(5)])
        pairs = first[:, None] * pair.target(texts).logits[:, -1].double().softmax(-1)
    assert counts.view(5, 5)[2].sum() > 20 and chi_square_p_value(counts, pairs.flatten()) > 1e-6


@pytest.mark.parametrize("borrows", [False, True])
def test_a_cut_draft_keeps_its_output_and_a_target_that_lends_embeddings_stays_as_it_is(borrows):
    pair = tiny_pair(vocab_size=5)
    smaller = tiny_pair(vocab_size=3)
    known = torch.tensor([True] * 3 + [False] * 2)
    pair = replace(pair, draft=pair.draft if borrows else smaller.draft, known_to_draft=known)
    keep_tokens(pair.draft, torch.tensor([0, 2]))
    if borrows:
        borrow_embedding(pair.draft, pair.target)
    before = pair.target.get_input_embeddings().weight.clone()
    _fit_to_vocabulary(pair.draft, known)
    assert torch.equal(pair.target.get_input_embeddings().weight, before)
    assert pair.draft.get_input_embeddings().weight.shape[0] == 5
    logits = pair.draft_lm.logits(pair.draft_lm.hidden_states(torch.tensor([[1, 4]])))
    assert (logits > -torch.inf).tolist() == [[[True, False, True, False, False]] * 2]


def test_the_probability_that_is_lost_is_reported(pair, tmp_path):
    limits = ResponseLimits(16, 128, 4)
    prompts = encode_prompts(pair, list(NanoSource(3, 0, 0).load(pair.chats)), limits)
    recorder = Recorder(pair, Warp(1.0), limits, RecordSettings(1, 20), 0, tmp_path)
    overlap, unknown = agreement(
        pair, record_sets(recorder, {"some": prompts}, [], ground_truth=False)["some"], Warp(1.0)
    )
    assert 0 < unknown.mean() < 0.5
    assert (overlap <= 1 - unknown + 1e-6).all()


def test_a_quantized_draft_that_is_too_small_is_refused():
    pair = tiny_pair(vocab_size=3)
    pair.draft.config.quantization_config = {"quant_method": "int8"}
    with pytest.raises(
        UserError, match="the quantized draft has 3 embeddings, and the target knows 5 tokens"
    ):
        _fit_to_vocabulary(pair.draft, torch.tensor([True] * 3 + [False] * 2))
