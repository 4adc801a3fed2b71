"""Totals and rates of generations, by hand."""

import pytest
from fakes import tiny_pair

from specheads import SpeculativeDecoder
from specheads.decoding.records import DecodeStats, Round
from specheads.decoding.stopping import FixedLength


def one_round(tokens, drafted, seconds):
    return Round(
        list(range(tokens)),
        drafted,
        tokens - 1,
        drafted - tokens + 1,
        drafted,
        *(seconds * x for x in (0.5, 0.3, 0.2)),
    )


def test_speed_is_that_of_the_rounds_however_long_the_prompt_takes():
    rounds = [one_round(3, 4, 0.1), one_round(5, 4, 0.3)]
    for prefill in (0.0, 0.7, 100.0):
        stats = DecodeStats.of(rounds, prefill)
        assert stats.tokens_per_second == pytest.approx(
            8 / 0.4
        ) and stats.decode_seconds == pytest.approx(0.4)
        assert (stats.seconds, stats.prefill_seconds) == (pytest.approx(0.4 + prefill), prefill)


def test_the_speed_of_several_generations_is_that_of_all_their_rounds():
    parts = [
        DecodeStats.of([one_round(3, 4, 0.1)], 2.0),
        DecodeStats.of([one_round(5, 4, 0.3)], 5.0),
    ]
    total = DecodeStats.total(parts)
    assert total.tokens_per_second == pytest.approx(8 / 0.4) and total.prefill_seconds == 7.0
    assert (total.discard_rate, total.verification_rate, total.block_efficiency) == (
        2 / 8,
        2 / 8,
        4.0,
    )
    assert total.acceptance_rate == 6 / 8


def test_a_generation_records_the_seconds_of_reading_its_prompt():
    out = SpeculativeDecoder(tiny_pair(8), stopping=FixedLength(2)).generate([1, 2, 3, 4], 6)
    assert out.stats.prefill_seconds > 0
    assert out.stats.decode_seconds == pytest.approx(sum(record.seconds for record in out.rounds))
    assert out.stats.tokens_per_second == pytest.approx(len(out.tokens) / out.stats.decode_seconds)
