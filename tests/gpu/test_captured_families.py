"""Nano and every model family in float64: eager steps, captured ones and transformers' plain
generation emit the same tokens.
"""

import pytest
from draftings import DRAFTINGS
from families import CONFIGS, WINDOW

from specheads import SpeculativeDecoder, Warp, generate_baseline, stopping
from specheads.papers import TreeMatch
from tests.gpu.checks import (
    ENGINES,
    family_there,
    plain_greedy,
    random_head,
    random_prompt,
    with_reading_draft,
)

NUM_TOKENS = 40  # beyond Gemma 2's sliding window
GREEDY = Warp(temperature=0)
PROMPTS = [3, 15]  # their lengths
RULES = ["fixed", "input_token", "next_token"]


@pytest.fixture(scope="module", params=["nano", *CONFIGS])
def pair(request, device):
    return (
        request.getfixturevalue("nano64_there")
        if request.param == "nano"
        else family_there(request.param, device)
    )


@pytest.fixture(scope="module")
def references(pair):
    prompts = [random_prompt(length, seed) for seed, length in enumerate(PROMPTS)]
    return [(prompt, plain_greedy(pair, prompt, NUM_TOKENS)) for prompt in prompts]


def rule_of(pair, name):
    if name == "fixed":
        return stopping.FixedLength(4)
    return stopping.HeadThreshold(random_head(pair, name), 0.7, max_tokens=7)


def prepared(decoder):
    return decoder.draft_engine.num_prepared + decoder.target_engine.num_prepared


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_tokens_are_those_of_plain_generation(pair, references, engine, rule):
    decoder = SpeculativeDecoder(
        pair, stopping=rule_of(pair, rule), warp=GREEDY, engine=engine, window=WINDOW
    )
    before = decoder.warm_up() and prepared(decoder)
    for prompt, expected in references:
        assert decoder.generate(prompt, NUM_TOKENS, stop_tokens=()).tokens.tolist() == expected
    assert prepared(decoder) == before  # nothing is captured in mid-generation
    assert before > 0 or engine == "eager"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_target_alone_emits_the_same_tokens(pair, references, engine):
    for prompt, expected in references:
        made = generate_baseline(
            pair, prompt, NUM_TOKENS, warp=GREEDY, engine=engine, stop_tokens=()
        )
        assert made.tokens.tolist() == expected


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("warp", [Warp(1.0, top_k=5), Warp(0.8, top_p=0.9)], ids=["top_k", "top_p"])
def test_sampled_rounds_are_the_same_in_both_engines(pair, warp, rule):
    decoders = [
        SpeculativeDecoder(
            pair, stopping=rule_of(pair, rule), warp=warp, engine=name, window=WINDOW
        )
        for name in ENGINES
    ]
    responses = set()
    for seed in range(3):
        eager, captured = (
            each.generate(random_prompt(6), NUM_TOKENS, seed, stop_tokens=()) for each in decoders
        )
        assert captured.tokens.tolist() == eager.tokens.tolist()
        assert [r.num_accepted for r in captured.rounds] == [r.num_accepted for r in eager.rounds]
        responses.add(tuple(eager.tokens.tolist()))
    assert len(responses) > 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_draft_that_reads_its_target_changes_no_greedy_token(pair, references, engine):
    reading = with_reading_draft(pair)
    decoder = SpeculativeDecoder(
        reading, stopping=stopping.FixedLength(4), warp=GREEDY, engine=engine, window=WINDOW
    )
    prompts = [prompt for prompt, _ in references]
    found = [decoder.generate(prompt, NUM_TOKENS, stop_tokens=()) for prompt in prompts]
    found += decoder.generate_batch(prompts, max_new_tokens=NUM_TOKENS, stop_tokens=())
    for out, (_, expected) in zip(found, [*references, *references], strict=True):
        assert out.tokens.tolist() == expected


@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_draft_that_reads_its_target_drafts_the_same_in_both_engines(pair, max_batch):
    reading = with_reading_draft(pair)
    found = []
    for name in ENGINES:
        decoder = SpeculativeDecoder(
            reading,
            stopping=stopping.Confidence(0.4, 6),
            warp=Warp(1.0, top_k=5),
            engine=name,
            window=WINDOW,
        )
        prompts = [random_prompt(length) for length in (2, 6, 30)]
        outs = decoder.generate_batch(
            prompts, max_batch=max_batch, max_new_tokens=NUM_TOKENS, stop_tokens=()
        )
        drafted = [[(r.num_drafted, r.num_accepted) for r in out.rounds] for out in outs]
        found.append((drafted, [out.tokens.tolist() for out in outs]))
    assert found[0] == found[1]


def test_every_drafted_length(pair, references):
    """Each has its own size of verification, or shares a padded one."""
    prompt, expected = references[0]
    decoder = SpeculativeDecoder(
        pair, stopping=stopping.FixedLength(20), warp=GREEDY, engine="cuda_graph", window=WINDOW
    )
    for length in range(1, 21):
        out = decoder.with_stopping(stopping.FixedLength(length)).generate(
            prompt, NUM_TOKENS, stop_tokens=()
        )
        assert out.tokens.tolist() == expected
        assert max(r.num_drafted for r in out.rounds) == length


def test_responses_end_at_the_window_in_both_engines(pair):
    """The last forward passes are padded beyond it."""
    prompt = random_prompt(WINDOW - 20)
    outputs = []
    for engine in ENGINES:
        decoder = SpeculativeDecoder(
            pair, stopping=stopping.FixedLength(6), warp=GREEDY, engine=engine, window=WINDOW
        )
        outputs.append(decoder.generate(prompt, 100, stop_tokens=()))
    assert outputs[0].finish_reason == outputs[1].finish_reason == "context"
    assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist() and len(outputs[0].tokens) == 20


@pytest.mark.parametrize("way", ["tree", "graph", "multi", "beam"])
def test_trees_emit_the_tokens_of_plain_generation(pair, references, way):
    prompt, expected = references[0]
    rules = {"stopping": stopping.FixedLength(4), "verification": TreeMatch()}
    decoder = SpeculativeDecoder(
        pair, DRAFTINGS[way], warp=GREEDY, engine="cuda_graph", window=WINDOW, **rules
    )
    before = decoder.warm_up() and prepared(decoder)
    assert decoder.generate(prompt, NUM_TOKENS, stop_tokens=()).tokens.tolist() == expected
    assert prepared(decoder) == before > 0
