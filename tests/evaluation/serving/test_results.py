"""Numbers of a simulation, from rounds given by hand."""

from dataclasses import fields

import numpy as np
import pytest

from specheads.evaluation.serving.results import ServingResult, gain, mean_interval, over_seeds, result_of
from specheads.evaluation.serving.simulation import Served, ServedRound
from specheads.evaluation.serving.traffic import Traffic

# Three requests of the responses 0, 1, 0, of 4 and 6 tokens; the first was under way at the start.
REQUESTS = np.array([0, 1, 0])
ROUNDS = [
    ServedRound(end=1.0, seconds=1.0, requests=1, steps=2, drafted=2, submitted=2, accepted=1, tokens=2),
    ServedRound(end=2.0, seconds=1.0, requests=0, steps=0, drafted=0, submitted=0, accepted=0, tokens=0),
    ServedRound(end=4.0, seconds=2.0, requests=2, steps=3, drafted=6, submitted=4, accepted=3, tokens=5),
    ServedRound(end=9.0, seconds=5.0, requests=2, steps=0, drafted=0, submitted=0, accepted=0, tokens=2),
]


def served():
    times = (np.array(column) for column in ([0.0, 1.0, 1.5], [0.0, 1.0, 2.0], [1.0, 4.0, 4.0], [4.0, 9.0, 7.0]))
    return Served(*times, target_steps=np.array([1, 2, 2]), rounds=ROUNDS)


def test_open_loops_count_every_round_and_every_whole_request():
    traffic = Traffic(REQUESTS, np.zeros(3, dtype=int), np.array([2, 0, 0]), 2, np.array([0.0, 1.0, 1.5]))
    result = result_of(served(), traffic, np.array([4, 6]))
    assert result.tokens_per_second == pytest.approx(9 / 9.0)
    assert result.user_tokens_per_second == pytest.approx(np.median([6 / 8, 4 / 5]))
    assert result.token_ms_p50 == pytest.approx(np.median([1e3 * 5 / 5, 1e3 * 3 / 3]))
    assert result.first_token_ms_p50 == pytest.approx(np.median([3e3, 2.5e3]))
    assert result.block_efficiency == pytest.approx(9 / 5)
    assert result.discard_rate == pytest.approx(4 / 9) and result.rejected_rate == pytest.approx(2 / 9)
    assert result.draft_steps == pytest.approx(5 / 3) and result.submitted == pytest.approx(6 / 5)


def test_closed_loops_count_what_happens_while_requests_wait():
    ends = served()
    ends.admitted[2] = 4.0
    ends.finished[1] = 3.5
    traffic = Traffic(REQUESTS, np.zeros(3, dtype=int), np.array([2, 0, 0]), 2)
    result = result_of(ends, traffic, np.array([4, 6]))
    assert result.tokens_per_second == pytest.approx(7 / 4.0)
    assert result.user_tokens_per_second == pytest.approx(6 / 2.5)  # the second request only


def test_intervals_over_seeds_are_those_of_student():
    """Of 1, 2, 3, 4: mean 2.5, standard error 0.6455, quantile 3.18 at three degrees of freedom."""
    interval = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert (interval.low, interval.value, interval.high) == pytest.approx((2.5 - 2.053, 2.5, 2.5 + 2.053), abs=1e-3)
    alone = mean_interval([2.0])
    assert alone.low == alone.value == alone.high == 2.0


def test_gains_are_compared_seed_by_seed():
    """Twice as fast on every seed: no width, however much the seeds differ."""
    slow = [ServingResult(*[float(speed)] * len(fields(ServingResult))) for speed in (10, 20, 40)]
    fast = [ServingResult(*[2.0 * speed] * len(fields(ServingResult))) for speed in (10, 20, 40)]
    assert vars(gain(fast, slow)) == {"value": 2.0, "low": 2.0, "high": 2.0}
    numbers = over_seeds(slow)
    assert numbers.keys() == {field.name for field in fields(ServingResult)}
    assert numbers["tokens_per_second"].high > numbers["tokens_per_second"].value
