"""A row of a batch emits what a decoder for one prompt emits, whatever its neighbours do."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from fakes import needs_compiler, tiny_llama, tiny_pair
from families import CONFIGS, VOCAB_SIZE, family_pair
from torch import Tensor

from specheads import (
    AcceptanceHead,
    HeadConfig,
    SpeculativeDecoder,
    Warp,
    stopping,
    verification,
)
from specheads.decoding import batching
from specheads.decoding.engine.cuda_graph import PART

GREEDY = Warp(temperature=0)
SAMPLED = Warp(top_k=4, top_p=0.95)
PROMPTS = [[1, 2, 3], [4], [5, 6, 0, 3, 2, 1, 4], [1, 2], [3, 1, 2, 1], [2], [6, 6]]
SEEDS = [3, 1, 4, 1, 5, 9, 2]


def random_head(hidden_size, predicts="next_token", inputs=(), **sizes):
    torch.manual_seed(0)
    head = AcceptanceHead(
        HeadConfig(hidden_size, depth=1, predicts=predicts, inputs=inputs, **sizes)
    ).double()
    torch.nn.init.normal_(head.readout.weight)
    return head.requires_grad_(False)


class Count(NamedTuple):
    steps: Tensor  # (B,) long, in all rounds
    distribution: Tensor  # (B, 2), a state with a dimension more


class EveryThird(stopping.StoppingRule):
    """Stop after every third step since the prompt: a rule whose state would show a step that
    should not have been, for example of a row whose draft has ended.
    """

    needs = frozenset({"max_prob"})
    max_tokens = 5
    compile_key = "every third"

    def start_prompt(self, batch, device):
        steps = torch.zeros(batch, dtype=torch.long, device=device)
        return Count(steps, torch.zeros(batch, 2, device=device))

    def start_round(self, state):
        return state

    def step(self, state, features):
        steps = state.steps + 1
        added = state.distribution + features["max_prob"][:, None].float()
        return Count(steps, added), steps % 3 == 0


RULES = [
    EveryThird(),
    stopping.FixedLength(3),
    stopping.HeadThreshold(random_head(16), 0.6, max_tokens=6),
    stopping.HeadThreshold(random_head(16, "input_token"), 0.6, max_tokens=6),
    stopping.HeadThreshold(random_head(16, inputs=("hidden", "second_prob")), 0.6, max_tokens=6),
    stopping.OnlineLogistic(max_tokens=6),
    stopping.Confidence(max_tokens=6),
]


def batched(decoder, prompts, max_batch, max_new_tokens, seeds=None, **kwargs):
    """Return the generations in the order of the prompts, which end in another.

    Default: seed 0 for all.
    """
    seeds = [0] * len(prompts) if seeds is None else seeds
    done = dict(
        decoder.generate_batch(
            prompts,
            max_batch=max_batch,
            max_new_tokens=max_new_tokens,
            seeds=seeds,
            as_completed=True,
            **kwargs,
        )
    )
    assert sorted(done) == list(range(len(prompts)))
    return [done[number] for number in range(len(prompts))]


def untimed(generation):
    """Return the rounds without their seconds."""
    seconds = dict.fromkeys(
        ("wait_seconds", "draft_seconds", "verify_seconds", "commit_seconds"), 0
    )
    return [made._replace(**seconds) for made in generation.rounds]


@pytest.mark.parametrize(
    ("rule", "warp"),
    [pytest.param(rule, SAMPLED, id=f"{type(rule).__name__}-sampled") for rule in RULES]
    + [pytest.param(rule, GREEDY, id=f"{type(rule).__name__}-greedy") for rule in RULES[:2]]
    + [
        pytest.param(rule, GREEDY, id=f"{type(rule).__name__}-greedy", marks=pytest.mark.full)
        for rule in RULES[2:]
    ],
)
def test_rows_emit_what_a_decoder_for_one_prompt_emits(rule, warp):
    decoder = SpeculativeDecoder(
        tiny_pair(vocab_size=7, scale=2.0), stopping=rule, warp=warp, engine="eager"
    )
    expected = [
        decoder.generate(prompt, 20, seed) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    for one, other in zip(expected, batched(decoder, PROMPTS, 3, 20, SEEDS), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert untimed(one) == untimed(other)
        assert (one.finish_reason, one.prompt_ids.tolist()) == (
            other.finish_reason,
            other.prompt_ids.tolist(),
        )
    assert len({r.num_drafted for each in expected for r in each.rounds}) > 1 or warp is GREEDY


@pytest.mark.parametrize(
    ("warp", "engine", "sizes"),
    [
        pytest.param(GREEDY, "cuda_graph", (2, 7), id="greedy-cuda_graph"),
        # Each size takes 10 seconds
        pytest.param(SAMPLED, "compiled", (3,), id="sampled-compiled", marks=needs_compiler),
        pytest.param(
            GREEDY,
            "compiled",
            (2, 7),
            id="greedy-compiled",
            marks=[needs_compiler, pytest.mark.full],
        ),
        pytest.param(
            SAMPLED, "cuda_graph", (2, 7), id="sampled-cuda_graph", marks=pytest.mark.full
        ),
    ],
)
def test_rows_of_other_engines_emit_the_same_tokens(warp, engine, sizes):
    # Models of one shape, so that what reads prompts is compiled once.
    pair = replace(tiny_pair(vocab_size=7, scale=2.0), target=tiny_llama(7, seed=1, scale=2.0))
    rule = RULES[2]
    verify = verification.BlockVerification()
    decoder = SpeculativeDecoder(
        pair, stopping=rule, verification=verify, warp=warp, engine="eager"
    )
    expected = [
        decoder.generate(prompt, 25, seed).tokens.tolist()
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    decoder = SpeculativeDecoder(pair, stopping=rule, verification=verify, warp=warp, engine=engine)
    for max_batch in sizes:
        rows = batched(decoder, PROMPTS, max_batch, 25, SEEDS)
        assert [row.tokens.tolist() for row in rows] == expected


@pytest.mark.parametrize(
    "warp",
    [
        pytest.param(GREEDY, id="greedy", marks=pytest.mark.full),
        pytest.param(SAMPLED, id="sampled"),
    ],
)
def test_captured_rows_go_on_in_larger_memory(warp):
    """A step is captured again where a row outgrows what it reads, with the inputs of that call and
    not of the one before.
    """
    pair = tiny_pair(vocab_size=7, scale=2.0, window=512)
    rule = RULES[2]
    prompts = [[1, 2, 3], [4], [5, 6]]
    made = {}
    for engine in ("eager", "cuda_graph"):
        decoder = SpeculativeDecoder(pair, stopping=rule, warp=warp, engine=engine)
        rows = batched(decoder, prompts, 2, PART + 8, [0, 1, 2], stop_tokens=())
        made[engine] = [row.tokens.tolist() for row in rows]
    assert made["eager"] == made["cuda_graph"] and min(map(len, made["eager"])) > PART


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_rows_are_what_plain_generation_gives(name):
    pair = family_pair(name)
    prompts = []
    expected = []
    for seed, length in enumerate((3, 9, 1, 15)):
        prompt = torch.randint(
            VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed)
        )
        out = pair.target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=30,
            do_sample=False,
            pad_token_id=0,
        )
        prompts.append(prompt[0].tolist())
        expected.append(out[0, length:].tolist())
    rule = stopping.HeadThreshold(random_head_of(pair), 0.7, max_tokens=5)
    decoder = SpeculativeDecoder(pair, stopping=rule, warp=GREEDY, engine="eager")
    rows = batched(decoder, prompts, 3, 30)
    assert [row.tokens.tolist() for row in rows] == expected
    assert (
        0 < sum(row.stats.num_accepted for row in rows) < sum(row.stats.num_drafted for row in rows)
    )


def random_head_of(pair):
    size = pair.draft.get_input_embeddings().weight.shape[1]
    return random_head(pair.draft_lm.hidden_size, embedding_size=size)


def test_generations_are_yielded_as_they_end_and_prompts_are_read_as_there_is_room():
    decoder = SpeculativeDecoder(tiny_pair(vocab_size=7, scale=2.0), warp=GREEDY, engine="eager")
    taken = []

    def prompts():
        for number, prompt in enumerate(PROMPTS):
            taken.append(number)
            yield prompt

    first = next(
        decoder.generate_batch(prompts(), max_batch=2, max_new_tokens=10, as_completed=True)
    )
    assert first[1].stats.num_tokens == 10 and len(taken) == 2


class CountingClock:
    """A clock that shows how often it was read."""

    count = 0

    def __init__(self, models):
        pass

    def mark(self):
        CountingClock.count += 1
        return float(CountingClock.count)

    def read(self, *marks):
        return list(marks)


def test_the_seconds_of_a_row_reach_from_its_start_to_its_last_token(monkeypatch):
    """Also while others' prompts are read.

    Of one row after another, each begins where the one before it has ended.
    """
    monkeypatch.setattr(batching, "Clock", CountingClock)
    decoder = SpeculativeDecoder(tiny_pair(vocab_size=7, scale=2.0), warp=GREEDY, engine="eager")
    CountingClock.count = 0
    rows = batched(decoder, PROMPTS, 1, 10)
    assert sum(row.stats.seconds + 1 + len(row.rounds) for row in rows) == CountingClock.count
    # One that is alone waits for nobody
    assert all(made.wait_seconds == 0 for row in rows for made in row.rounds)
    waits = {
        made.wait_seconds for row in batched(decoder, PROMPTS, 3, 10, SEEDS) for made in row.rounds
    }
    assert waits == {1, 3}  # the clock is read twice more where a prompt is read


def test_decoders_with_other_rules_share_the_memory_of_rows():
    shared = SpeculativeDecoder(tiny_pair(vocab_size=7, scale=2.0), warp=SAMPLED, engine="eager")
    first, second = (shared.with_stopping(stopping.FixedLength(length)) for length in (2, 4))
    expected = [
        [decoder.generate(prompt, 20, 3).tokens.tolist() for prompt in PROMPTS]
        for decoder in (first, second)
    ]
    for turn in (0, 1, 0):
        rows = batched((first, second)[turn], PROMPTS, 3, 20, [3] * len(PROMPTS))
        assert [row.tokens.tolist() for row in rows] == expected[turn]
    assert first._engines_of(3) is second._engines_of(3) is shared._engines_of(3)
