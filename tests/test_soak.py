"""The benchmark of long runs: its slopes are those of the samples, it tells growth from noise, and its parts run."""

import mmap
import os

import numpy as np
import pytest

from benchmarks import soak
from benchmarks.process_usage import Usage, mean_ratio, slope, student
from benchmarks.soak import age_table, verdict_of

SMALL = ["--size", "1", "--engine", "eager", "--result", "none"]


def noisy(growth, size=100, seed=0):
    """Samples around 1,000 that grow by a share of it while they are observed."""
    noise = np.random.default_rng(seed).normal(0, 5, size)
    return [1000 * (1 + growth * index / size) + error for index, error in enumerate(noise)]


def test_a_slope_is_that_of_the_line_without_the_warm_up():
    values = [50.0] * 10 + [2.0 * index + 1 for index in range(10, 40)]
    line = slope(range(40), values)
    assert line.value == pytest.approx(2) and line.low == pytest.approx(2) and line.high == pytest.approx(2)
    assert line.mean == pytest.approx(2 * 24.5 + 1) and line.per(3600)["value"] == pytest.approx(7200)
    with pytest.raises(ValueError, match="2 samples are too few"):
        slope(range(2), values[:2])


def test_growth_is_told_from_noise():
    grown = slope(range(100), noisy(0.1))
    assert grown.is_flat is False and verdict_of(grown) == "NO" and grown.growth == pytest.approx(0.075 / 1.06, rel=0.1)
    assert verdict_of(slope(range(100), noisy(0.01))) == "yes"  # too little to matter
    assert verdict_of(slope(range(100), noisy(-0.1))) == "yes"
    shaken = np.random.default_rng(0).normal(1000, 500, 100)
    assert verdict_of(slope(range(100), shaken)) == "too noisy to say"


def test_an_interval_covers_a_slope_of_zero_as_often_as_it_says():
    """Of 1,000 intervals of 95 %, fewer than 922 or more than 976 would cover it by chance with a probability below 1e-4."""
    lines = [slope(range(100), noisy(0.0, seed=seed)) for seed in range(1000)]
    assert 922 <= sum(line.low <= 0 <= line.high for line in lines) <= 976


@pytest.mark.parametrize(("degrees", "quantile"), [(5, 2.571), (10, 2.228), (22, 2.074), (1000, 1.962)])
def test_students_quantiles_are_those_of_the_tables(degrees, quantile):
    assert student(degrees) == pytest.approx(quantile, abs=0.005)


def test_what_a_process_holds_is_counted():
    before = Usage.now()
    kept = mmap.mmap(-1, 2**26)  # from the system: an array may get what was freed before
    kept.write(bytes(2**26))
    array, objects = np.ones(2**23), [object() for _ in range(1000)]
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    after = Usage.now()
    for descriptor in descriptors:
        os.close(descriptor)
    assert after.files == before.files + 3 and after.threads >= 1
    assert after.resident - before.resident > 0.9 * len(kept)
    assert after.heap - before.heap >= array.nbytes and after.blocks - before.blocks >= len(objects)


def test_a_mean_ratio_is_that_of_all_pairs_and_its_interval_covers_it():
    """Of 1,000 intervals of 95 %, fewer than 922 or more than 976 would cover it by chance with a probability below 1e-4."""
    assert mean_ratio([(2.0, 1.0), (8.0, 1.0)])["value"] == pytest.approx(4)
    with pytest.raises(ValueError, match="1 pairs are too few"):
        mean_ratio([(1.0, 1.0)])
    covered = 0
    for seed in range(1000):
        noise = np.random.default_rng(seed).normal(0, 0.1, (30, 2))
        ratio = mean_ratio([(1.25 * np.exp(one), np.exp(other)) for one, other in noise])
        covered += ratio["low"] <= 1.25 <= ratio["high"]
    assert 922 <= covered <= 976


def test_a_slower_machine_is_slower_for_both_processes():
    """Whose turns are compared in pairs; work that takes longer in one of them is seen."""
    slower = [1 + number / 10 for number in range(30)]  # the machine
    aged = [{"steady": 1e-3 * factor, "slowing": 1.1e-3 * factor, "noisy": 1e-3 * factor} for factor in slower]
    noise = np.random.default_rng(0).normal(0, 0.5, 30)
    fresh = [
        {"steady": 1e-3 * factor, "slowing": 1e-3 * factor, "noisy": 1e-3 * factor * np.exp(error)}
        for factor, error in zip(slower, noise, strict=True)
    ]
    rows = age_table(aged, fresh, 20.0).rows
    assert [(row[0], row[-1]) for row in rows] == [("steady", "no"), ("slowing", "YES"), ("noisy", "too noisy to say")]
    assert rows[1][3]["value"] == pytest.approx(1.1) and rows[1][1] == pytest.approx(1.1 * rows[1][2])


def test_turns_are_sampled_and_have_slopes():
    table, counts = soak.main(["slopes", "--minutes", "0", "--pairs", "0", *SMALL])
    names = [row[0] for row in table.rows]
    assert names[:3] == ["resident memory, MiB", "C heap in use, MiB", "Python's blocks in use"]
    assert names[3:5] == ["open files", "threads"] and len(names) == 9
    assert [row[0] for row in counts.rows] == ["single", "batched", "data", "evaluation"]
    assert [row[1] for row in counts.rows] == [3, 12, 6, 6]  # in three turns
    assert table.rows[3][2] == {"value": 0, "low": 0, "high": 0}  # no file stays open


@pytest.mark.full  # a process that imports everything
def test_turns_are_compared_with_those_of_a_new_process():
    _, counts, ages = soak.main(["slopes", "--minutes", "0", "--pairs", "2", *SMALL])
    assert ages.key == "ages" and [row[0] for row in ages.rows] == [row[0] for row in counts.rows]
    assert all(row[3]["low"] <= row[3]["value"] <= row[3]["high"] for row in ages.rows)


def test_outputs_are_the_same_amid_and_after_others():
    (table,) = soak.main(["outputs", "--generations", "8", "--checked", "3", *SMALL])
    assert [row[:5] for row in table.rows] == [["eager", "single", 8, 0, 0], ["eager", "batched", 8, 0, 0]]


def test_outputs_that_drift_are_counted(monkeypatch):
    calls = []

    def drifting(decoder, prompts, seeds):
        calls.append(len(prompts))
        return [[len(calls) > 3, 1]] * len(prompts)

    monkeypatch.setattr(soak, "single_tokens", drifting)
    (table,) = soak.main(["outputs", "--generations", "8", "--checked", "3", *SMALL])
    assert table.rows[0][3:5] == [0, 3]


def test_every_head_of_a_bank_is_exported():
    (table,) = soak.main(["heads", "--heads", "20", "--epochs", "1", *SMALL])
    assert [row[:2] for row in table.rows] == [[1, 1], [20, 20]]
