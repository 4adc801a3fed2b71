import itertools
from dataclasses import replace

import pytest
import torch
from fakes import constant_head, needs_compiler, tiny_llama, tiny_pair
from statistics_helper import chi_square_p_value

from specheads import (
    SpeculativeDecoder,
    UserError,
    Warp,
    generate_baseline,
    load_pair,
    stopping,
    verification,
)
from specheads.heads.batch import HeadBatch, head_features
from specheads.pair.quantization import round_weights

ALL_FEATURES = frozenset(
    {"hidden", "embedding", "draft_prob", "max_prob", "entropy", "second_prob"}
)
GREEDY = Warp(temperature=0)
NUM_SAMPLES = 800


class Spy(stopping.FixedLength):
    """A fixed length that keeps every step's features."""

    needs = ALL_FEATURES

    def __init__(self, num_tokens):
        super().__init__(num_tokens)
        self.seen = []

    def step(self, state, features):
        self.seen.append(features)
        return super().step(state, features)


def decode(pair, prompt, rule=None, warp=GREEDY, **kwargs):
    return SpeculativeDecoder(pair, stopping=rule, warp=warp).generate(prompt, **kwargs)


def test_no_token_is_drafted_that_could_not_be_used():
    pair = tiny_pair(vocab_size=5, same=True)
    out = decode(pair, [0, 1], stopping.FixedLength(4), max_new_tokens=8)
    assert [r.num_drafted for r in out.rounds] == [4, 2]
    assert decode(pair, [0, 1], max_new_tokens=1).stats.num_draft_calls == 0


@pytest.mark.parametrize("as_list", [False, True])
def test_the_targets_generation_config_says_where_a_response_ends(as_list):
    pair = tiny_pair(vocab_size=7, scale=2.0)
    free = decode(pair, [1, 2, 3], max_new_tokens=30).tokens.tolist()
    stop = free[12]
    pair.target.generation_config.eos_token_id = [stop, 99] if as_list else stop
    out = decode(pair, [1, 2, 3], stopping.FixedLength(6), max_new_tokens=30)
    assert out.tokens.tolist() == free[: free.index(stop) + 1]
    assert out.finish_reason == "stop"
    assert (
        generate_baseline(pair, [1, 2, 3], 30, warp=GREEDY).tokens.tolist() == out.tokens.tolist()
    )
    assert decode(pair, [1, 2, 3], max_new_tokens=30, stop_tokens=[]).tokens.tolist() == free


@pytest.mark.parametrize(
    "form",
    [
        int,
        torch.tensor,
        lambda stop: torch.tensor([stop]),
        lambda stop: iter([stop]),
        lambda stop: {stop},
    ],
)
def test_stop_tokens_come_in_any_form(form):
    pair = tiny_pair(vocab_size=7, scale=2.0)
    decoder = SpeculativeDecoder(pair, warp=GREEDY, engine="eager")
    free = decoder.generate([1, 2, 3], 30, stop_tokens=()).tokens.tolist()
    expected = free[: free.index(free[12]) + 1]
    assert decoder.generate([1, 2, 3], 30, stop_tokens=form(free[12])).tokens.tolist() == expected
    # Read once, for all prompts
    batch = decoder.generate_batch(
        [[1, 2, 3]] * 3, max_batch=2, max_new_tokens=30, stop_tokens=form(free[12])
    )
    assert [generation.tokens.tolist() for generation in batch] == [expected] * 3


@pytest.mark.parametrize("wrong", ["</s>", ["</s>"], [2.0], 2.0, torch.tensor([2.0])])
def test_stop_tokens_that_are_no_ids_are_refused(wrong):
    decoder = SpeculativeDecoder(tiny_pair(), engine="eager")
    for decode_with in (
        decoder.generate,
        decoder.stream,
        lambda prompt, stop_tokens: decoder.generate_batch([prompt], stop_tokens=stop_tokens),
    ):
        with pytest.raises(UserError, match="must be token ids"):
            decode_with([1], stop_tokens=wrong)


def test_an_end_token_ends_the_draft():
    pair = tiny_pair(vocab_size=7, scale=2.0, same=True)
    free = decode(pair, [1, 2, 3], max_new_tokens=10).tokens.tolist()
    stop = free[4]
    out = decode(pair, [1, 2, 3], stopping.FixedLength(20), max_new_tokens=30, stop_tokens=[stop])
    end = free.index(stop) + 1
    assert (
        out.rounds[-1].num_drafted,
        out.rounds[-1].num_accepted,
        out.rounds[-1].num_discarded,
    ) == (end, end, 0)
    assert list(out.rounds[-1].tokens) == free[:end]


def _batch_of_one(decoder):
    made = decoder.generate_batch(
        [[1, 2], [3, 4]], max_batch=1, max_new_tokens=20, as_completed=True
    )
    return (each.text for _, each in made)


def _stream(decoder):
    return decoder.stream("abc", 30)


@pytest.mark.parametrize("opened", [_batch_of_one, _stream])
@pytest.mark.parametrize(
    "use",
    [
        lambda decoder: decoder.generate([5], 8),
        lambda decoder: next(decoder.stream("ab", 8)),
        lambda decoder: list(_batch_of_one(decoder)),
        lambda decoder: decoder.with_stopping(stopping.FixedLength(2)).generate([5], 8),
    ],
)
def test_a_decoder_that_is_decoding_refuses_others_and_is_right_afterwards(opened, use):
    decoder = SpeculativeDecoder(tiny_pair(vocab_size=7), warp=Warp())
    first = opened(decoder)
    alone = [*opened(decoder)]
    texts = [next(first)]
    with pytest.raises(UserError, match="this decoder is decoding already"):
        use(decoder)
    texts += first
    assert texts == alone
    use(decoder)


def test_a_stream_refuses_a_bad_prompt_at_once():
    with pytest.raises(UserError, match="empty"):
        SpeculativeDecoder(tiny_pair()).stream("")


def test_a_stream_never_cuts_a_character(nano):
    """Characters of several bytes are several tokens of a byte-level tokenizer."""
    decoder = SpeculativeDecoder(nano)
    text = "naïve 中文 🙂 end"
    ids = nano.tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = iter([ids[i : i + 2] for i in range(0, len(ids), 2)])

    def decode(requests, stop_tokens):
        (request,) = requests
        for piece in pieces:
            request.committed += piece
            request.finish_reason = "length" if len(request.response) == len(ids) else None
            yield [request]

    decoder.single.decode = decode
    shown = list(decoder.stream("def f():", 100))
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_strings_ids_tensors_and_messages_are_prompts(nano):
    text = "def f(x):\n"
    expected = nano.tokenizer(text)["input_ids"]
    assert (
        nano.encode(text).tolist()
        == nano.encode(expected).tolist()
        == nano.encode(torch.tensor([expected])).tolist()
        == expected
    )
    with pytest.raises(UserError, match="chat template"):
        nano.encode([{"role": "user", "content": text}])
    nano.tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    try:
        # One begin token, not two
        assert nano.encode([{"role": "user", "content": text}]).tolist() == expected
        assert nano.encode_instruction(text) == expected
    finally:
        nano.tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([0] * 64, "64 tokens, but the target's context is 64"),
        ([0, 9], "9 is outside the vocabulary of 3"),
    ],
)
def test_impossible_prompts_are_refused(prompt, message):
    with pytest.raises(UserError, match=message):
        decode(tiny_pair(), prompt)


def test_a_smaller_window_takes_less_memory_and_ends_responses_sooner():
    pair = tiny_pair(window=64)
    decoder = SpeculativeDecoder(pair, window=12)
    out = decoder.generate([0] * 8, 30)
    assert (len(out.tokens), out.finish_reason) == (4, "context")
    assert decoder.target_engine._layers[0].keys.shape[2] == 12
    with pytest.raises(UserError, match="memory for 12"):
        decoder.generate([0] * 12)
    with pytest.raises(UserError, match="window=65"):
        SpeculativeDecoder(pair, window=65)


def test_a_head_for_another_draft_is_refused():
    from specheads import AcceptanceHead, HeadConfig

    pair = tiny_pair()
    with pytest.raises(UserError, match="size 99.*size 16"):
        decode(pair, [0], stopping.HeadThreshold(AcceptanceHead(HeadConfig(99))))
    other = HeadConfig(16, draft={"id": "tiny-draft", "revision": "r1"})
    with pytest.raises(UserError, match="revision r1.*revision r2"):
        decode(pair, [0], stopping.HeadThreshold(AcceptanceHead(other)))
    decode(
        pair,
        [0],
        stopping.HeadThreshold(AcceptanceHead(replace(other, draft={"id": "x", "revision": "r2"}))),
        max_new_tokens=4,
    )


def exact_distribution(pair, prompt, length, warp):
    """The target's distribution of the next `length` tokens, by enumeration."""
    size = pair.vocab_size
    distribution = torch.ones(size**length, dtype=torch.float64)
    for number, tokens in enumerate(itertools.product(range(size), repeat=length)):
        probs = warp(pair.target(torch.tensor([[*prompt, *tokens]])).logits[0])
        for i, token in enumerate(tokens):
            distribution[number] *= probs[len(prompt) - 1 + i, token]
    return distribution


@pytest.mark.parametrize(
    ("rule", "warp"),
    [
        (stopping.FixedLength(2), Warp()),
        (stopping.HeadThreshold(constant_head(0.7), 0.5), Warp(1.5, top_p=0.9)),
        pytest.param(stopping.FixedLength(2), Warp(1.5, top_p=0.9), marks=pytest.mark.full),
        pytest.param(
            stopping.HeadThreshold(constant_head(0.7), 0.5), Warp(), marks=pytest.mark.full
        ),
    ],
    ids=["fixed length", "head, warped", "fixed length, warped", "head"],
)
def test_sampled_output_follows_the_targets_distribution(rule, warp):
    """Every response of three tokens over three letters, against the enumerated distribution."""
    pair = tiny_pair(scale=1.5)
    distribution = exact_distribution(pair, [0, 1], 3, warp)
    decoder = SpeculativeDecoder(pair, stopping=rule, warp=warp)
    counts = torch.zeros(27)
    accepted = 0
    for out in decoder.generate_batch(
        [[0, 1]] * NUM_SAMPLES, max_batch=100, max_new_tokens=3, seeds=range(NUM_SAMPLES)
    ):
        counts[(out.tokens * torch.tensor([9, 3, 1])).sum()] += 1
        accepted += out.stats.num_accepted
    assert 0.2 < accepted / (2 * NUM_SAMPLES) < 0.95  # neither trivial nor hopeless
    # false alarm with probability 1e-6
    assert chi_square_p_value(counts, distribution) > 1e-6


@pytest.mark.parametrize(
    ("rule", "engine"),
    [
        (verification.BlockVerification(), "cuda_graph"),
        pytest.param(verification.BlockVerification(), "eager", marks=pytest.mark.full),
    ],
    ids=lambda value: getattr(value, "label", value),
)
def test_blocks_follow_the_targets_distribution(rule, engine):
    """Every response of four tokens over two letters, drafted three at a time."""
    pair = tiny_pair(vocab_size=2, scale=1.5)
    distribution = exact_distribution(pair, [0, 1], 4, Warp())
    counts = torch.zeros(16)
    decoder = SpeculativeDecoder(
        pair, stopping=stopping.FixedLength(3), verification=rule, warp=Warp(), engine=engine
    )
    for out in decoder.generate_batch(
        [[0, 1]] * NUM_SAMPLES, max_batch=100, max_new_tokens=4, seeds=range(NUM_SAMPLES)
    ):
        counts[(out.tokens * torch.tensor([8, 4, 2, 1])).sum()] += 1
    # false alarm with probability 1e-6
    assert chi_square_p_value(counts, distribution) > 1e-6


@pytest.fixture
def pair_in_8_bits():
    pair = tiny_pair(scale=1.5)
    draft = tiny_llama(3, seed=2, scale=1.5, width=32).float()
    round_weights(draft, "Q8_0")
    return replace(pair, target=pair.target.float(), draft=draft)


def test_activations_of_drafts_are_rounded_and_of_targets_if_someone_says_so(pair_in_8_bits):
    assert pair_in_8_bits.draft_lm.input_bits == 16 and pair_in_8_bits.target_lm.input_bits == 32
    assert replace(pair_in_8_bits, draft_activations="float32").draft_lm.input_bits == 32
    assert replace(pair_in_8_bits, activations="int8").target_lm.input_bits == 8


@needs_compiler
@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_a_target_with_rounded_activations_says_with_a_draft_what_it_says_alone(
    pair_in_8_bits, activations
):
    target = pair_in_8_bits.target
    round_weights(target, "Q4_1")
    pair = replace(pair_in_8_bits, target=target, activations=activations)
    decoder = SpeculativeDecoder(
        pair, stopping=stopping.FixedLength(4), warp=GREEDY, engine="compiled"
    )
    for prompt in ([0, 1], [2], [1, 2, 0]):
        alone = generate_baseline(pair, prompt, 24, warp=GREEDY, engine="compiled")
        assert decoder.generate(prompt, 24).tokens.tolist() == alone.tokens.tolist()


def test_a_target_with_activations_of_8_bits_is_another_model():
    revisions = set()
    for activations in ("float32", "int8"):
        revisions.add(load_pair("nano", activations=activations).target_revision)
    assert len(revisions) == 2


@needs_compiler
def test_a_draft_in_8_bits_decodes_the_targets_greedy_response(pair_in_8_bits):
    rule = stopping.FixedLength(2)
    decoder = SpeculativeDecoder(pair_in_8_bits, stopping=rule, warp=GREEDY, engine="compiled")
    alone = generate_baseline(pair_in_8_bits, [0, 1], 24, warp=GREEDY, engine="eager")
    out = decoder.generate([0, 1], 24)
    assert out.tokens.tolist() == alone.tokens.tolist()
    assert out.stats.num_accepted


@needs_compiler
@pytest.mark.full
def test_a_draft_in_8_bits_decodes_the_targets_distribution(pair_in_8_bits):
    """Every response of three tokens over three letters, in compiled steps."""
    distribution = exact_distribution(pair_in_8_bits, [0, 1], 3, Warp())
    rule = stopping.FixedLength(2)
    decoder = SpeculativeDecoder(pair_in_8_bits, stopping=rule, warp=Warp(), engine="compiled")
    counts = torch.zeros(27)
    for seed in range(NUM_SAMPLES):
        out = decoder.generate([0, 1], 3, seed=seed)
        counts[(out.tokens * torch.tensor([9, 3, 1])).sum()] += 1
    # false alarm with probability 1e-6
    assert chi_square_p_value(counts, distribution) > 1e-6


def test_a_wrong_distribution_would_be_noticed():
    pair = tiny_pair(scale=1.5)
    draft_distribution = exact_distribution(replace(pair, target=pair.draft), [0, 1], 3, Warp())
    counts = torch.multinomial(
        draft_distribution,
        NUM_SAMPLES,
        replacement=True,
        generator=torch.Generator().manual_seed(0),
    ).bincount(minlength=27)
    assert chi_square_p_value(counts, exact_distribution(pair, [0, 1], 3, Warp())) < 1e-6


def training_features(pair, prefix, drafted, predicts, shift=0):
    """What training computes for tokens drafted after `prefix`.

    `shift` taps that many positions late.
    """
    index = len(prefix) + torch.arange(len(drafted)) + shift
    tokens = torch.tensor([[*prefix, *drafted, 0]])
    batch = HeadBatch(tokens, torch.zeros_like(index), index, torch.tensor(drafted), {})
    needs = (
        ALL_FEATURES
        if predicts == "next_token"
        else frozenset({"hidden", "max_prob", "entropy", "second_prob"})
    )
    return head_features(pair, batch, predicts, needs)


@pytest.mark.parametrize(("fixture", "tolerance"), [("nano64", 1e-12), ("nano", 1e-5)])
@pytest.mark.parametrize("predicts", ["next_token", "input_token"])
def test_a_head_gets_the_training_features_in_the_decoder(
    fixture, tolerance, predicts, prompts, request
):
    """Differences are relative to the largest value of a feature.

    At step j an `input_token` head predicts y_{j-1}.
    """
    pair = request.getfixturevalue(fixture)
    spy = Spy(5)
    lag = 1 if predicts == "input_token" else 0
    out = decode(pair, prompts[0], spy, Warp(1.0, 50), max_new_tokens=40, seed=1)
    # Both kinds of rewinding happen
    assert out.stats.num_discarded > 0 and out.stats.num_accepted > 0
    seen = iter(spy.seen)
    emitted = []
    compared = 0
    for r in out.rounds:
        steps = list(itertools.islice(seen, r.num_drafted))
        prefix = [*prompts[0], *emitted]
        emitted += r.tokens
        drafted = [find_token(pair, step["embedding"]) for step in steps][: len(steps) - lag]
        if not drafted:
            continue
        compared += len(drafted)
        expected, late = (
            training_features(pair, prefix, drafted, predicts, shift) for shift in (0, 1)
        )
        for name in expected:
            decoded = torch.cat([step[name] for step in steps[lag:]])
            scale = expected[name].abs().max()
            assert (decoded - expected[name]).abs().max() <= tolerance * scale, name
            if name != "embedding":
                assert (decoded - late[name]).abs().max() > 1e-3 * scale, (
                    f"{name}: an off-by-one tap would pass"
                )
    assert compared > 30


def find_token(pair, embedding):
    weight = pair.draft.get_input_embeddings().weight
    return int((weight - embedding).abs().sum(-1).argmin())


@pytest.mark.parametrize("max_batch", [1, 2])
def test_a_draft_of_a_smaller_window_cuts_nothing_short(caplog, max_batch):
    """The target goes on alone after it, and from the beginning where the prompt is longer."""
    pair = replace(
        tiny_pair(vocab_size=7, scale=2.0, window=64),
        draft=tiny_llama(7, seed=2, scale=2.0, window=24),
    )
    prompts = [[1, 2, 3], list(range(7)) * 4, [5] * 23, [5] * 24, [6] * 25]
    decoder = SpeculativeDecoder(pair, warp=GREEDY, engine="eager")
    assert "reads 24 positions, the target 64: the target goes on alone" in caplog.text
    found = decoder.generate_batch(prompts, max_batch=max_batch, max_new_tokens=60)
    for number, prompt in enumerate(prompts):
        expected = generate_baseline(pair, prompt, 60, warp=GREEDY, engine="eager")
        assert found[number].tokens.tolist() == expected.tokens.tolist()
        assert len(expected.tokens) == min(60, 64 - len(prompt))
    assert found[0].stats.num_drafted > 5 and found[1].stats.num_drafted == 0
