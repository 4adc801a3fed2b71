"""A busy machine is noticed, and a quiet one is not called busy."""

from dataclasses import replace

import numpy as np
import pytest
from report_example import about, report_example

from specheads.decoding.records import DecodeStats
from specheads.evaluation.candidates import TARGET_ALONE, fixed_length
from specheads.evaluation.intervals import Interval
from specheads.evaluation.sweep import Measured, doubts_of, round_times
from specheads.replay.cost import fit_costs

NUM_PROMPTS, TOKENS = 16, 60
STEP, PASS = 0.001, 0.004


def decoded(k, slow, rng):
    """A fixed length (None: target alone) on prompts of various lengths; a share `slow` of its rounds is ten times as long."""
    prompts, stats = [], []
    for prompt in range(NUM_PROMPTS):
        rows, tokens = [], 0
        while tokens < TOKENS * (1 + prompt % 4) / 2:
            accepted = 0 if k is None else int(rng.integers(0, k + 1))
            busy = (1 + 9 * (rng.random() < slow)) * (1 + 0.05 * rng.standard_normal())
            rows.append([accepted + 1, k or 0, k or 0, STEP * (k or 0) * busy, (PASS + 0.0002 * (k or 0)) * busy])
            tokens += accepted + 1
        prompts.append(rows)
        drafted = (k or 0) * len(rows)
        stats.append(DecodeStats(tokens, drafted, 0, drafted, len(rows), drafted, sum(r[3] + r[4] for r in rows), 0.0))
    setting = TARGET_ALONE if k is None else fixed_length(k)
    return Measured(setting, stats, prompts)


def sweep(slow):
    rng = np.random.default_rng(0)
    return [decoded(k, slow, rng) for k in (None, 1, 2, 4)]


def fit_of(measured):
    return fit_costs(*round_times(measured))[0]


def doubts(slow, live=(), num_groups=NUM_PROMPTS):
    measured = sweep(slow)
    return list(doubts_of(measured[0], fit_of(measured), live, num_groups))


def test_a_quiet_machine_raises_no_doubt():
    assert doubts(0.0) == []


def test_one_slow_round_in_ten_is_noticed():
    (reason,) = doubts(0.1)
    assert "a step of the target alone took 2." in reason and "quiet machine" in reason


def test_other_processes_are_noticed():
    measured = sweep(0.0)
    (reason,) = doubts_of(replace(measured[0], load=[(1.8, 3.0), (0.0, 1.0)]), fit_of(measured), (), NUM_PROMPTS)
    assert "other processes took 1.4 of its cores" in reason
    assert not [*doubts_of(replace(measured[0], load=[(0.4, 1.0), (0.0, 9.0)]), fit_of(measured), (), NUM_PROMPTS)]


def test_the_steps_of_the_target_alone_are_per_token():
    measured = sweep(0.0)[0]
    assert np.median(measured.pace) == pytest.approx(PASS, rel=0.02)


def test_a_speed_that_is_hardly_known_is_named():
    live = report_example().live
    wide = replace(live[2], name="the wide one", tokens_per_second=Interval(100.0, 85.0, 110.0))
    assert doubts(0.0, live) == []
    (reasons,) = doubts(0.0, [*live, wide])
    assert "The interval of the speed of the wide one is ±12%" in reasons and about(1.0).high < 1.1


def test_prompts_of_few_files_are_a_doubt():
    """Resampling one file or two gives intervals of no width, however little they tell."""
    (reasons,) = doubts(0.0, num_groups=2)
    assert "Only 2 independent prompts were decoded" in reasons
