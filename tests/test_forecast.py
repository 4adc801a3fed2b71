"""The remaining time, by a clock that the tests move."""

import logging
import threading
import time

import pytest

from specheads.forecast import Forecast, progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("options", "points", "expected"),
    [
        # The clock starts at (5, 2). At 25, 3 were done in 15 seconds; at 65, 20 in 40.
        (
            {},
            [(5, 2), (10, 3), (25, 6), (40, 7), (65, 26), (80, 50)],
            [
                "6 of 50, 5.0 seconds each, about 0:03:40 to go",
                "26 of 50, 2.0 seconds each, about 0:00:48 to go",
            ],
        ),
        # The pace is that of the last half, whose beginning is the middle itself.
        (
            {"first": 20.0, "every": 1.0},
            [(0, 0), (10, 1), (20, 4), (30, 7)],
            ["4 of 7, 3.3 seconds each, about 0:00:10 to go"],
        ),
        ({}, [(0, 0), (100, 0)], []),  # nothing was done
    ],
)
def test_the_remaining_time_is_logged(clock, caplog, options, points, expected):
    forecast = Forecast("decoding", **options)
    with caplog.at_level(logging.INFO):
        for clock[0], done in points:
            forecast.update(done, points[-1][1] or 5)
    assert caplog.messages == [f"decoding: {text}" for text in expected]


def test_a_phase_at_another_pace_is_soon_seen(clock, caplog):
    forecast = Forecast("predicting")
    with caplog.at_level(logging.INFO):
        for done in range(400):  # the second half takes ten times as long
            clock[0] += 0.1 if done < 200 else 1.0
            forecast.update(done, 400)
    assert len(caplog.records) == 7  # at 10, 40, 70 and so on
    last = caplog.messages[-1]
    assert last.startswith("predicting: 371 of 400, 1.0 a second")
    assert last.endswith("about 0:00:29 to go")


def test_a_thread_breaks_the_silence(clock, caplog):
    with caplog.at_level(logging.INFO), progress("compiling", 3):
        clock[0] = 31.0
        for _ in range(600):  # the thread looks once a second
            if not caplog.records:
                threading.Event().wait(0.1)
    assert caplog.messages == ["compiling: 0 of 3, 0:00:31 so far"]
