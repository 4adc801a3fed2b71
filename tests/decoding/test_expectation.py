"""Tokens that a rule expected to be accepted, beside those that were."""

import pytest
from fakes import constant_head, tiny_pair

from specheads import SpeculativeDecoder
from specheads.decoding.stopping import HeadThreshold
from specheads.decoding.verification import BlockVerification, TokenVerification

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
    ("predicts", "verification"),
    [
        ("next_token", BlockVerification()),  # predictions are those of token verification
        ("input_token", TokenVerification()),  # the last drafted token has no prediction
    ],
)
def test_without_a_prediction_for_every_token_no_number_is_expected(predicts, verification):
    decoder = SpeculativeDecoder(
        tiny_pair(8),
        stopping=HeadThreshold(constant_head(0.8, predicts), 0.7),
        verification=verification,
    )
    assert decoder.generate(PROMPT, 9).stats.num_expected is None
    (out,) = decoder.generate_batch([PROMPT], max_batch=1, max_new_tokens=9)
    assert out.stats.num_expected is None
