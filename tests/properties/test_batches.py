"""A row of a batch emits what a decoder for one prompt emits, and a replay has the rounds of
decoding, on random cases.
"""

import hashlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties.strategies import (
    LONGEST,
    PAIRINGS,
    WINDOW,
    cases,
    draft_rules,
    head_of,
    kept_tokens,
    length_rules,
    pair_of,
    probabilities,
    prompts,
    seeds,
    tries,
)
from random_recording import rounds_of

from specheads import SpeculativeDecoder, UserError, Warp, generate_baseline
from specheads.decoding import stopping
from specheads.decoding.decoder import Baseline
from specheads.decoding.drafting import Autoregressive
from specheads.decoding.verification import VerificationRule
from specheads.prompts.prompt import Prompt, ResponseLimits
from specheads.replay.head_scores import add_predictions, head_fingerprint
from specheads.replay.recording import Recorder, load_recording
from specheads.replay.replay import recorded_head, replay
from specheads.replay.response_tree import RecordSettings

CHAIN_RULES = ["token", "block", "biased", "big_little", "synthetic"]


def counts(generation):
    return [
        (record.num_drafted, record.num_accepted, list(record.tokens))
        for record in generation.rounds
    ]


@st.composite
def several(draw, vocab_size, window):
    """Return a few prompts that fit into a window, with their seeds."""
    given = draw(st.lists(prompts(vocab_size, min(6, window - 1)), min_size=1, max_size=5))
    return given, draw(st.lists(seeds, min_size=len(given), max_size=len(given)))


@given(
    cases([("chain", rule) for rule in CHAIN_RULES]), st.booleans(), st.integers(1, 4), st.data()
)
def test_rows_of_a_batch_emit_what_each_prompt_does_alone(case, drafts, max_batch, data):
    texts, numbers = data.draw(several(case.vocab_size, case.window))
    target = Baseline(case.pair, case.warp, "eager", case.window)
    decoder = case.decoder() if drafts else target
    rows = decoder.generate_batch(
        texts,
        max_batch=max_batch,
        max_new_tokens=case.max_new_tokens,
        seeds=numbers,
        stop_tokens=case.stop_tokens,
    )
    assert len(rows) == len(texts)
    for number, (text, seed) in enumerate(zip(texts, numbers, strict=True)):
        alone = decoder.generate(text, case.max_new_tokens, seed, case.stop_tokens)
        row = rows[number]
        assert counts(row) == counts(alone) and row.finish_reason == alone.finish_reason
        assert row.tokens.tolist() == alone.tokens.tolist() and row.text == alone.text


@given(cases([pairing for pairing in PAIRINGS if pairing[0] != "chain"]), st.integers(1, 3))
def test_other_pairings_decode_batches_or_are_refused_at_once(case, max_batch):
    decoder = case.decoder()
    is_chain = isinstance(case.drafting, Autoregressive) and isinstance(
        case.verification, VerificationRule
    )
    if max_batch == 1 or is_chain:
        (row,) = decoder.generate_batch(
            [case.prompt],
            max_batch=max_batch,
            max_new_tokens=case.max_new_tokens,
            seeds=[case.seed],
            stop_tokens=case.stop_tokens,
        )
        assert row.tokens.tolist() == decoder.generate(*case.request).tokens.tolist()
        return
    with pytest.raises(
        UserError,
        match=f"^{type(case.drafting).__name__} with .* decodes one prompt at a time; batches need",
    ):
        decoder.generate_batch([case.prompt], max_batch=max_batch)


# --- replay


@st.composite
def recorded_rules(draw, heads):
    """Return a stopping rule as it decodes, and as it is replayed."""
    if draw(st.booleans()):
        rule = draw(length_rules | draft_rules)
        return rule, rule
    head = draw(st.sampled_from(heads))
    most = draw(st.integers(2, LONGEST))
    threshold = draw(probabilities())
    if draw(st.booleans()):
        return tuple(
            stopping.HeadThreshold(asked, threshold, max_tokens=most)
            for asked in (head, recorded_head(head))
        )
    return tuple(
        stopping.OnlineHead(asked, threshold, max_tokens=most)
        for asked in (head, recorded_head(head))
    )


HEADS = [
    head_of(predicts, ("hidden",), 0, 3.0, False) for predicts in ("next_token", "input_token")
]


@tries(0.4)
@given(st.data(), st.integers(2, 7), st.sampled_from([0.5, 2.0]), st.booleans(), st.integers(1, 24))
def test_in_greedy_decoding_a_replay_has_the_rounds_of_decoding(
    data, vocab_size, scale, same, max_new_tokens
):
    pair = pair_of(vocab_size, scale, same, data.draw(kept_tokens(vocab_size)))
    warp = Warp(temperature=0)
    texts = data.draw(
        st.lists(prompts(vocab_size, WINDOW // 4), min_size=1, max_size=3, unique_by=tuple)
    )
    encoded = [
        (Prompt(hashlib.sha256(str(ids).encode()).hexdigest()[:16], "test", ""), ids)
        for ids in texts
    ]
    rules = data.draw(st.lists(recorded_rules(HEADS), min_size=1, max_size=6))
    pair.target.generation_config.eos_token_id = data.draw(
        st.none() | st.integers(0, vocab_size - 1)
    )
    try:
        with tempfile.TemporaryDirectory() as root:
            limits = ResponseLimits(max_new_tokens)
            settings = RecordSettings(1, LONGEST)
            made = Recorder(pair, warp, limits, settings, 0, Path(root)).record([encoded])[0]
            named = {head_fingerprint(head): head for head in HEADS}
            add_predictions(made, pair, named, ground_truth=False)
            recording = load_recording(made, list(named))
            replayed = replay(recording, [recorded for _, recorded in rules])
        for (rule, _), rounds in zip(rules, replayed, strict=True):
            decoder = SpeculativeDecoder(pair, stopping=rule, warp=warp, engine="eager")
            for number, ids in enumerate(texts):
                live = decoder.generate(ids, max_new_tokens)
                plain = generate_baseline(pair, ids, max_new_tokens, warp=warp, engine="eager")
                assert live.tokens.tolist() == plain.tokens.tolist()
                assert rounds_of(rounds, number) == [
                    (r.num_drafted, r.num_accepted, len(r.tokens)) for r in live.rounds
                ]
    finally:
        pair.target.generation_config.eos_token_id = None
