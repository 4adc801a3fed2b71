"""Tokens that a rule expected to be accepted, beside those that were."""

import pytest
from fakes import constant_head, tiny_pair

from specheads import SpeculativeDecoder
from specheads.decoding.records import DecodeStats
from specheads.decoding.stopping import (
    DraftProduct,
    FixedLength,
    HeadThreshold,
    Logistic,
    OnlineLogistic,
)
from specheads.decoding.verification import BlockVerification

PROMPT = [1, 2, 3, 4]


def expected_by_hand(rounds, prob):
    return sum(prob**place for made in rounds for place in range(1, made.num_drafted + 1))


@pytest.mark.parametrize("prob", [0.5, 0.9])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 12])
def test_the_expected_number_is_the_sum_of_survival_over_all_drafted_tokens(prob, max_new_tokens):
    decoder = SpeculativeDecoder(tiny_pair(8), stopping=HeadThreshold(constant_head(prob), 0.7))
    out = decoder.generate(PROMPT, max_new_tokens)
    expected = expected_by_hand(out.rounds, prob)
    assert out.stats.num_expected == pytest.approx(expected)
    assert (out.stats.accepted_over_expected is None) == (expected == 0)
    again = decoder.generate(PROMPT, max_new_tokens)  # nothing is left of the first prompt
    assert again.stats.num_expected == out.stats.num_expected


def test_predictions_that_hold_expect_what_is_accepted():
    """The draft is the target, so every token is accepted."""
    rule = HeadThreshold(constant_head(1 - 1e-12), 0.7)
    decoder = SpeculativeDecoder(tiny_pair(8, same=True), stopping=rule)
    stats = decoder.generate(PROMPT, 12).stats
    assert stats.num_accepted == stats.num_drafted > 0
    assert stats.accepted_over_expected == pytest.approx(1)


def test_rows_of_a_batch_expect_what_single_prompts_do():
    decoder = SpeculativeDecoder(tiny_pair(8), stopping=HeadThreshold(constant_head(0.8), 0.7))
    prompts = [PROMPT, [3, 1], [5, 6, 7]]
    for number, out in enumerate(
        decoder.generate_batch(prompts, max_batch=2, max_new_tokens=9, seeds=[0, 1, 2])
    ):
        single = decoder.generate(prompts[number], 9, seed=number)
        assert out.stats.num_expected == pytest.approx(single.stats.num_expected)
        assert out.stats.num_expected == pytest.approx(expected_by_hand(out.rounds, 0.8))


@pytest.mark.parametrize(
    ("rule", "knows"),
    [
        (FixedLength(3), False),
        (DraftProduct(0.7), False),
        (HeadThreshold(constant_head(0.8, "input_token"), 0.7), False),
        (HeadThreshold(constant_head(0.8), 0.7), True),
        (Logistic({"logit_max_prob": 1.0, "bias": 0.0}), True),
        (OnlineLogistic(), True),
    ],
)
def test_rules_that_predict_every_token_have_a_number(rule, knows):
    assert (
        SpeculativeDecoder(tiny_pair(8), stopping=rule).generate(PROMPT, 9).stats.num_expected
        is not None
    ) == knows


def test_predictions_of_token_verification_say_nothing_of_another_rule():
    decoder = SpeculativeDecoder(
        tiny_pair(8),
        stopping=HeadThreshold(constant_head(0.8), 0.7),
        verification=BlockVerification(),
    )
    assert decoder.generate(PROMPT, 9).stats.num_expected is None
    (out,) = decoder.generate_batch([PROMPT], max_batch=1, max_new_tokens=9)
    assert out.stats.num_expected is None


def test_the_total_is_known_if_every_part_is():
    known = DecodeStats(4, 3, 2, 1, 2, 3, 1.0, 0.0, num_expected=1.5)
    unknown = DecodeStats(4, 3, 2, 1, 2, 3, 1.0, 0.0)
    total = DecodeStats.total([known, known])
    assert (total.num_expected, total.accepted_over_expected) == (3.0, pytest.approx(4 / 3))
    assert DecodeStats.total([known, unknown]).num_expected is None
    assert unknown.accepted_over_expected is None
