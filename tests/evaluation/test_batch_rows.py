"""Rows of a report, from runs given by hand."""

import pytest

from specheads.decoding.records import DecodeStats
from specheads.evaluation.batches import BatchRun, batch_rows
from specheads.evaluation.candidates import TARGET_ALONE, Candidate


def run(seconds, *responses):
    """A run of responses, each the seconds of its prompt and the tokens and seconds of its rounds."""
    stats = [
        DecodeStats(sum(n for n, _ in rounds), 0, 0, 0, len(rounds), 0, prefill + sum(s for _, s in rounds), prefill)
        for prefill, rounds in responses
    ]
    return BatchRun(seconds, stats, [rounds for _, rounds in responses])


SLOW = run(4.0, (0.1, [(1, 0.4), (1, 0.5)]), (0.2, [(1, 0.6), (1, 0.2)]))
FAST = run(1.0, (0.1, [(2, 0.4)]), (0.1, [(1, 0.2), (1, 0.2)]))
MIDDLE = run(2.0, (0.1, [(2, 0.9)]), (0.2, [(2, 0.3)]))


def test_the_numbers_of_rows_are_those_computed_by_hand():
    settings = [TARGET_ALONE, Candidate("head_threshold", "fast", None, None)]
    alone, fast = batch_rows(settings, [[SLOW, SLOW], [FAST, MIDDLE]], ["a", "b"])
    assert (alone.tokens_per_second, alone.over_alone, alone.tokens_per_round) == (1.0, 1.0, 1.0)
    assert fast.tokens_per_second == (4 + 2) / 2  # the median of two runs
    assert fast.over_alone == (4 + 2) / 2
    # Requests: 2 tokens in 1.0, 1.0, 0.5, 0.5, 1.0 and 0.5 seconds.
    assert alone.request_tokens_per_second == pytest.approx(2.0)
    assert fast.request_tokens_per_second == pytest.approx((2 / 0.5 + 2 / 0.5) / 2)
    assert fast.speedup.value == pytest.approx((8 / 2.5) / (8 / 4.0))
    assert fast.speedup.low <= fast.speedup.value <= fast.speedup.high
    # Tokens of the fast setting: 0.2, 0.2, 0.2, 0.2, then 0.45, 0.45, 0.15, 0.15 seconds.
    assert fast.token_ms["p50"] == pytest.approx(200)
    assert fast.token_ms["p90"] == pytest.approx(450)  # places 6 and 7 of the sorted ones, counted from 0
    assert fast.first_token_ms["p50"] == pytest.approx(500)  # of 300, 500, 500, 1000
    assert alone.first_token_ms["p99"] == pytest.approx(800)
    assert fast.tokens_per_round == pytest.approx(8 / 5)


def test_repeated_prompts_are_resampled_together():
    """Where both requests are of one prompt there is nothing to resample."""
    settings = [TARGET_ALONE, Candidate("fixed_length", "fast", None, None)]
    _, one = batch_rows(settings, [[SLOW], [FAST]], ["a"])
    assert one.speedup.low == one.speedup.value == one.speedup.high
