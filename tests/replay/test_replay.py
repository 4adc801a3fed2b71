"""Replay against decoding itself: the same rounds in greedy mode, the same distribution of rounds
in sampling.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import family_pair
from feature_drafts import reading_pair, taught
from random_recording import random_recording, rounds_of

from specheads import (
    AcceptanceHead,
    HeadConfig,
    SpeculativeDecoder,
    UserError,
    Warp,
    generate_baseline,
)
from specheads.decoding import stopping
from specheads.prompts.prompt import Prompt, ResponseLimits
from specheads.replay.head_scores import add_predictions, head_fingerprint
from specheads.replay.recording import GROUND_TRUTH, Recorder, load_recording
from specheads.replay.replay import (
    Ceiling,
    RecordedHead,
    Replayed,
    head_logits,
    oracle,
    recorded_head,
    recorded_threshold,
    replay,
)
from specheads.replay.response_tree import RecordSettings

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def pair():
    pair = family_pair("llama")
    pair.target.generation_config.eos_token_id = 5
    return pair


@pytest.fixture(scope="module", params=["reads tokens", "reads its target"])
def any_pair(request, pair):
    if request.param == "reads tokens":
        return pair
    texts = []
    for _, ids in prompts(6):
        more = generate_baseline(pair, ids, NUM_TOKENS, warp=Warp(0), stop_tokens=[])
        texts.append([*ids, *more.tokens.tolist()][:NUM_TOKENS])
    return taught(reading_pair(pair, layers=(0, 1)), torch.tensor(texts))


@pytest.fixture(scope="module")
def heads():
    return made_heads()


@pytest.fixture(scope="module")
def any_heads(any_pair):
    return made_heads(*(["depth"] if any_pair.draft_lm.reads_layers else []))


def made_heads(*more):
    torch.manual_seed(0)
    looking = {
        "next_token": ("hidden", "embedding", "second_prob", *more),
        "input_token": ("hidden", "second_prob", *more),
    }
    heads = [AcceptanceHead(HeadConfig(32, 1, predicts, width=8)) for predicts in looking]
    heads += [
        AcceptanceHead(HeadConfig(32, 1, predicts, inputs, 8))
        for predicts, inputs in looking.items()
    ]
    for head in heads:
        head.eval().requires_grad_(False)
        torch.nn.init.normal_(head.readout.weight, std=2.0)
    return heads


def prompts(count):
    generator = np.random.default_rng(7)
    return [
        (Prompt(f"{i:04x}", "test", ""), generator.integers(29, size=3 + i % 5).tolist())
        for i in range(count)
    ]


def recorded(
    pair, heads, folder, warp, count, num_samples=1, max_new_tokens=NUM_TOKENS, max_tokens=20
):
    settings = ResponseLimits(max_new_tokens, batch_size=16)
    folder = Recorder(
        pair, warp, settings, RecordSettings(num_samples, max_tokens), 0, folder
    ).record([prompts(count)])[0]
    named = {head_fingerprint(head): head for head in heads}
    add_predictions(folder, pair, named, ground_truth=True)
    return load_recording(folder, [*named, GROUND_TRUTH])


def every_rule(heads):
    """Pairs of each rule as it decodes and as it is replayed."""
    simple = [
        stopping.FixedLength(1),
        stopping.FixedLength(4),
        stopping.FixedLength(20),
        stopping.MaxProbability(0.3, 12),
    ]
    rules = [(rule, rule) for rule in simple]
    for head in heads:
        for threshold in (0.2, 0.6, 0.95):
            rules.append(
                tuple(
                    stopping.HeadThreshold(asked, threshold)
                    for asked in (head, recorded_head(head))
                )
            )
    return rules + learning_rules(heads[0])


def learning_rules(head):
    """Rules that learn, or share a compile key, as they decode and as they are replayed."""
    makers = [
        lambda _, first: stopping.Confidence(0.4 if first else 0.7),
        lambda _, first: stopping.DraftProduct(0.5 if first else 0.9),
        lambda _, first: stopping.Logistic({"logit_max_prob": 0.5 + first, "bias": 0.1}, 0.6),
        lambda _, first: stopping.OnlineLogistic(prior=1.0 if first else 50.0, threshold=0.6),
        lambda head, first: stopping.OnlineHead(head, 0.6, prior=1.0 if first else 50.0),
    ]
    rules = []
    for make in makers:
        for first in (True, False):
            rules.append((make(head, first), make(recorded_head(head), first)))
    return rules


def live_rounds(pair, rule, count):
    """Rounds of greedy decoding of each of `count` prompts, which are decoded together: as one by
    one, but sooner.
    """
    decoder = SpeculativeDecoder(pair, stopping=rule, warp=Warp(0), engine="eager")
    decoded = decoder.generate_batch(
        [ids for _, ids in prompts(count)], max_batch=count, max_new_tokens=NUM_TOKENS
    )
    return [
        [(r.num_drafted, r.num_accepted, len(r.tokens)) for r in decoded[number].rounds]
        for number in range(count)
    ]


def test_in_greedy_mode_every_rule_has_exactly_the_rounds_of_decoding(
    any_pair, any_heads, tmp_path
):
    recording = recorded(any_pair, any_heads, tmp_path, Warp(0), 6)
    assert recording.num_samples == 1 and 0.3 < recording.accepted.float().mean() < 0.95
    assert recording.finished.any() and not recording.finished.all()
    rules = every_rule(any_heads)
    replayed = replay(recording, [rule for _, rule in rules])
    for (rule, _), rounds in zip(rules, replayed, strict=True):
        found = [rounds_of(rounds, number) for number in range(6)]
        assert found == live_rounds(any_pair, rule, 6), type(rule).__name__


def test_in_sampling_counts_agree_with_decoding_in_the_mean(any_pair, any_heads, tmp_path):
    """Target calls and discards per prompt, 30 prompts x 2 responses each way.

    False alarm 1e-5 per comparison (4.4 errors).
    """
    warp = Warp(0.8, top_k=6)
    count = 30
    repeats = 2
    length = 24
    parts = []
    for repeat in range(repeats):
        rows = [(replace(p, prompt_id=f"{p.prompt_id}{repeat}"), ids) for p, ids in prompts(count)]
        limits = ResponseLimits(length)
        recorder = Recorder(any_pair, warp, limits, RecordSettings(), 0, tmp_path)
        (folder,) = recorder.record([rows])
        named = {head_fingerprint(head): head for head in any_heads}
        add_predictions(folder, any_pair, named, ground_truth=False)
        parts.append(load_recording(folder, list(named)))
    for rule, recorded_rule in every_rule(any_heads)[1::2]:
        offline = [replay(part, [recorded_rule])[0].per_prompt(count) for part in parts]
        decoder = SpeculativeDecoder(any_pair, stopping=rule, warp=warp, engine="eager")
        asked = [ids for _, ids in prompts(count)] * repeats
        seeds = np.arange(repeats).repeat(count).tolist()
        # As one by one, but sooner
        decoded = decoder.generate_batch(
            asked, max_batch=len(asked), max_new_tokens=length, seeds=seeds
        )
        live = [
            [decoded[repeat * count + number].rounds for number in range(count)]
            for repeat in range(repeats)
        ]
        for name in ("calls", "discards", "tokens"):
            difference = np.zeros(count)
            for counts, generations in zip(offline, live, strict=True):
                ours = {
                    "calls": counts.target_calls,
                    "discards": counts.discarded,
                    "tokens": counts.tokens,
                }[name] / 4
                theirs = {
                    "calls": [len(rounds) for rounds in generations],
                    "discards": [sum(r.num_discarded for r in rounds) for rounds in generations],
                    "tokens": [sum(len(r.tokens) for r in rounds) for rounds in generations],
                }[name]
                difference += (ours - np.array(theirs)) / repeats
            assert abs(difference.mean()) < 4.4 * difference.std(ddof=1) / count**0.5 + 1e-9, (
                type(rule).__name__,
                name,
            )


class Growing(stopping.FixedLength):
    """Drafts one token in the first round, and in each later one some tokens more."""

    def __init__(self, growth):
        super().__init__(20)
        self.growth = growth
        self.compile_key = "growing", growth

    def start_prompt(self, batch, device):
        state = super().start_prompt(batch, device)
        return state._replace(max_tokens=torch.ones_like(state.max_tokens))

    def learn(self, state, num_drafted, num_accepted):
        return state._replace(max_tokens=state.max_tokens + self.growth)


class InTurn(stopping.StoppingRule):
    """Drafts one token in the first round, two in the second, three in the third, and again."""

    needs = frozenset()
    max_tokens = 3

    def start_prompt(self, batch, device):
        return torch.zeros((2, batch), dtype=torch.long, device=device).unbind()

    def start_round(self, state):
        _, num_rounds = state
        return torch.zeros_like(num_rounds), num_rounds + 1

    def step(self, state, features):
        num_drafted, num_rounds = state
        num_drafted = num_drafted + 1
        return (num_drafted, num_rounds), num_drafted > (num_rounds - 1) % 3


def test_a_rule_may_remember_earlier_rounds():
    (rounds,) = replay(random_recording(longest=60), [InTurn()])
    found = [drafted for prompt in range(6) for drafted, *_ in rounds_of(rounds, prompt)[:-3]]
    lengths = [len(rounds_of(rounds, prompt)[:-3]) for prompt in range(6)]
    assert found == [1 + number % 3 for length in lengths for number in range(length)]
    assert max(lengths) > 6


def test_rules_that_are_walked_together_have_the_same_rounds_as_alone(pair, heads, tmp_path):
    recording = recorded(pair, heads, tmp_path, Warp(1.0), 5, num_samples=3)
    rules = [rule for _, rule in every_rule(heads)] + [Growing(1), Growing(1), Growing(3)]
    for rule, together in zip(rules, replay(recording, rules), strict=True):
        (alone,) = replay(recording, [rule])
        for prompt in range(5):
            for draw in range(3):
                assert rounds_of(alone, prompt, draw) == rounds_of(together, prompt, draw)
        assert together.per_prompt(5).tokens.tolist() == (3 * recording.lengths).tolist()


def test_counts_are_of_every_prompt_also_of_those_without_a_round():
    drafted = np.array([2, 0, 3])
    accepted = np.array([1, 0, 3])
    counts = Replayed(
        np.array([1, 1, 2]), np.zeros(3), np.zeros(3), drafted, accepted, accepted + 1
    ).per_prompt(4)
    assert [counts.tokens.tolist(), counts.drafted.tolist(), counts.accepted.tolist()] == [
        [0, 3, 4, 0],
        [0, 2, 3, 0],
        [0, 1, 3, 0],
    ]
    assert counts.rounds.tolist() == [[0] * 4, [1, 0, 1, 0], [0, 0, 0, 1], [0] * 4]


@pytest.mark.parametrize("num_rounds", [0, 2])
def test_where_nothing_was_drafted_all_rounds_are_of_no_token(num_rounds):
    zeros = np.zeros(num_rounds, dtype=int)
    counts = Replayed(zeros, zeros, zeros, zeros, zeros, zeros + 1).per_prompt(2)
    assert counts.rounds.tolist() == [[num_rounds], [0]]
    assert counts.tokens.tolist() == counts.target_calls.tolist() == [num_rounds, 0]


class UntilToken(stopping.FixedLength):
    """Drafts up to some tokens, and ends at one with an even id."""

    needs = frozenset({"token"})
    compile_key = "until token"

    def step(self, state, features):
        state, stop = super().step(state, features)
        return state, stop | (features["token"] % 2 == 0)


def test_a_rule_that_reads_tokens_has_the_rounds_of_decoding(pair, tmp_path):
    rule = UntilToken(6)
    recording = recorded(pair, [], tmp_path, Warp(0), 4)
    (rounds,) = replay(recording, [rule])
    expected = live_rounds(pair, rule, 4)
    assert [rounds_of(rounds, number) for number in range(4)] == expected
    assert len({drafted for of_prompt in expected for drafted, _, _ in of_prompt}) > 3


def test_a_response_that_ended_one_token_before_its_limit_has_no_round_more():
    recording = random_recording(num_prompts=99)
    assert (recording.finished & (recording.lengths == recording.limits - 1)).any()
    for rounds in replay(recording, [stopping.FixedLength(3), stopping.MaxProbability(0.5, 8)]):
        assert rounds.per_prompt(99).tokens.tolist() == (2 * recording.lengths).tolist()


def test_the_greedy_oracle_discards_nothing_and_calls_once_per_difference(pair, heads, tmp_path):
    """SpecDec++, lemma 2.1: |S| + 1 calls where the response ends by itself and the models agree on
    its end.
    """
    recording = recorded(pair, heads, tmp_path, Warp(0), 8)
    counts = oracle(recording).per_prompt(8)
    assert counts.discarded.sum() == 0
    for number in range(8):
        first = recording.first[number]
        length = recording.lengths[number]
        differ = ~recording.accepted[0, first : first + length]
        # At the limit the last token is the target's, even where the draft agrees.
        expected = (
            differ.sum() + ~differ[-1] if recording.finished[number] else differ[:-1].sum() + 1
        )
        assert counts.target_calls[number] == int(expected)
        # The last round has no token of the target
        by_draft = int(recording.finished[number] and not differ[-1])
        assert counts.drafted[number] == length - counts.target_calls[number] + by_draft
    rules = [stopping.FixedLength(k) for k in range(1, 21)]
    for ratio in (1.5, 5, 20):
        cost = counts.drafted.sum() / ratio + counts.target_calls.sum()
        for rounds in replay(recording, [*rules, *(Ceiling(t) for t in (0.1, 0.5, 0.9))]):
            other = rounds.per_prompt(8)
            assert cost < other.drafted.sum() / ratio + other.target_calls.sum()


def test_true_probabilities_are_those_of_both_distributions(pair, heads, tmp_path):
    warp = Warp(0.8, top_k=6)
    recording = recorded(pair, heads, tmp_path, warp, 4, num_samples=2)
    ground_truth = recording.features[GROUND_TRUTH]
    for number in range(4):
        response = recording.response(number)
        first = int(recording.first[number])
        for i in range(0, len(response), 5):
            text = torch.tensor([recording.prompts[number] + response[:i]])
            t, d = (
                warp(model(text, use_cache=False).logits[0, -1])
                for model in (pair.target, pair.draft)
            )
            assert ground_truth[first + i] == pytest.approx(
                min(1.0, (t[response[i]] / d[response[i]]).item()) if d[response[i]] else 0.0,
                abs=1e-5,
            )
    tokens = recording.labels()
    assert (
        ground_truth[tokens.node[~tokens.accepted]] < 1
    ).all()  # only a token that the target likes less than the draft does is rejected


def rounds_by_hand(recording, prompt, sample, length_of):
    """The rounds of one response, where a draft that could have some nodes, the first of which are
    accepted, has `length_of(nodes, num_right)` of them.
    """
    first = int(recording.first[prompt])
    length = int(recording.lengths[prompt])
    start = 0
    rounds = []
    while start < length:
        nodes = []
        rejected = None
        for position in range(first + start, first + length):
            if not recording.accepted[sample, position]:
                rejected = position
                break
            nodes.append(position)
        num_right = len(nodes)
        if rejected is not None:
            branch = int(recording.branch_first[sample, rejected])
            nodes += range(branch, branch + int(recording.branch_length[sample, rejected]))
        # The last token before the limit is the target's
        nodes = nodes[: int(recording.limits[prompt]) - start - 1]
        drafted = length_of(nodes, num_right)
        accepted = min(drafted, num_right)
        emitted = min(accepted + 1, length - start)
        rounds.append((drafted, accepted, emitted))
        start += emitted
    return rounds


def check_rounds(rounds, recording, length_of):
    for prompt in range(recording.num_prompts):
        for sample in range(recording.num_samples):
            expected = rounds_by_hand(recording, prompt, sample, length_of)
            assert rounds_of(rounds, prompt, sample) == expected


@pytest.mark.parametrize(
    ("make", "arguments", "threshold", "max_tokens"),
    [
        (Ceiling, (), 0.7, 20),
        (Ceiling, (0.0,), 0.0, 20),
        (Ceiling, (0.4, 5), 0.4, 5),
        (recorded_threshold, (RecordedHead("logits", "next_token"), 0.5, 6), 0.5, 6),
    ],
)
def test_a_draft_ends_where_a_rejection_is_likelier_than_the_threshold(
    make, arguments, threshold, max_tokens
):
    recording = random_recording(num_prompts=20, max_tokens=20, acceptance=0.8)
    generator = torch.Generator().manual_seed(0)
    truth = (3 * torch.rand(len(recording.tokens), generator=generator)).clamp(max=1)
    recording.features.update({GROUND_TRUTH: truth, "logits": truth.logit()})

    def length_of(nodes, num_right):
        nodes = nodes[:max_tokens]
        all_accepted = truth[nodes].double().cumprod(0)
        too_risky = (1 - all_accepted > threshold).nonzero()
        return int(too_risky[0]) + 1 if len(too_risky) else len(nodes)

    (rounds,) = replay(recording, [make(*arguments)])
    check_rounds(rounds, recording, length_of)


def test_the_oracle_drafts_what_is_accepted_and_nothing_else():
    recording = random_recording(num_prompts=99, acceptance=0.8)
    last = recording.accepted[:, recording.first + recording.lengths - 1]
    assert last[:, recording.finished].any()  # a response can end with a token of the draft
    rounds = oracle(recording)
    check_rounds(rounds, recording, lambda nodes, num_right: min(len(nodes), num_right))
    assert rounds.per_prompt(99).tokens.tolist() == (2 * recording.lengths).tolist()


def test_recorded_heads_are_equal_where_name_and_calibration_are():
    head = RecordedHead("head", "next_token")
    same = RecordedHead("head", "next_token")
    calibration = {"slope": [2.0], "intercept": [0.0]}
    others = [
        RecordedHead("other", "next_token"),
        RecordedHead("head", "next_token", calibration),
        "head",
    ]
    assert head == same and hash(head) == hash(same)
    assert all(head != other for other in others)


def test_a_rule_that_was_not_recorded_for_is_refused(pair, heads, tmp_path):
    recording = recorded(pair, heads[:1], tmp_path, Warp(0), 2)
    with pytest.raises(
        UserError,
        match="^FixedLength drafts up to 21 .* of 20; give a smaller max_tokens[.]$",
    ):
        replay(recording, [stopping.FixedLength(21)])
    with pytest.raises(
        UserError,
        match="^HeadThreshold needs 'embedding', .*; it has token, .*draft_prob, entropy, ",
    ):
        replay(recording, [stopping.HeadThreshold(heads[0])])
    with pytest.raises(UserError, match=head_fingerprint(heads[1])):
        replay(recording, [stopping.HeadThreshold(recorded_head(heads[1]))])


def test_calibrated_heads_have_the_rounds_of_decoding_in_greedy_mode(any_pair, any_heads, tmp_path):
    """Rounds differ from those without the calibration.

    Heads that differ only in their calibration do not share rounds.
    """
    recording = recorded(any_pair, any_heads, tmp_path, Warp(0), 4)
    kinds = (
        (stopping.HeadThreshold, {"threshold": 0.6}),
        (stopping.OnlineHead, {"threshold": 0.6}),
    )
    values = (None, {"slope": [0.5, 2.0, 1.0], "intercept": [1.5, -0.5, 1.0]})
    for head in any_heads[1:3]:  # of either kind
        copies = [copy.deepcopy(head) for _ in values]
        for each, calibration in zip(copies, values, strict=True):
            each.config = replace(each.config, calibration=calibration)
        for kind, numbers in kinds:
            replayed = replay(recording, [kind(recorded_head(each), **numbers) for each in copies])
            for each, rounds in zip(copies, replayed, strict=True):
                assert [rounds_of(rounds, number) for number in range(4)] == live_rounds(
                    any_pair, kind(each, **numbers), 4
                )
            raw, calibrated = (
                [rounds_of(rounds, number) for number in range(4)] for rounds in replayed
            )
            assert raw != calibrated


def test_a_logit_is_that_of_the_node_from_which_the_head_predicts_the_token(pair, heads, tmp_path):
    """A head whose logit is the largest probability there.

    One that predicts its input token reads it one node later.
    """
    for head in heads[:2]:
        linear = AcceptanceHead(
            HeadConfig(32, 0, head.config.predicts, ("max_prob",), 1)
        ).requires_grad_(False)
        for name, value in linear.named_parameters():
            value.fill_(1.0 if "weight" in name else 0.0)
        recording = recorded(
            pair, [linear], tmp_path / head.config.predicts, Warp(1.0), 5, num_samples=2
        )
        logits, tokens = head_logits(recording, recorded_head(linear))
        torch.testing.assert_close(
            logits, recording.features["max_prob"][tokens.node].double(), atol=1e-6, rtol=0
        )
        labels = recording.labels()
        expected = labels.node
        if head.config.predicts == "input_token":
            expected = labels.after[labels.after >= 0]
        assert torch.equal(tokens.node, expected)
        assert len(tokens.accepted) == len(tokens.indices.furthest) == len(expected) > 100
