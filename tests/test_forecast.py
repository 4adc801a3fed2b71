"""The remaining time, by a clock that the tests move."""

import logging
import threading
import time
from functools import partial

import pytest

from specheads import forecast
from specheads.forecast import Forecast, progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_remaining_time_is_logged_when_enough_is_done_and_every_half_minute(clock, caplog):
    forecast = Forecast("decoding")
    with caplog.at_level(logging.INFO):
        # The clock starts at (5, 2). At 25, 3 were done in 15 seconds; at 65, 20 in 40.
        for now, done in ((5, 2), (10, 3), (25, 6), (40, 7), (65, 26), (80, 50)):
            clock[0] = now
            forecast.update(done, 50)
    assert [record.message for record in caplog.records] == [
        "decoding: 6 of 50, 5.0 seconds each, about 0:03:40 to go",
        "decoding: 26 of 50, 2.0 seconds each, about 0:00:48 to go",
    ]


def test_the_pace_is_that_of_the_last_half_and_ends_before_the_end(clock, caplog):
    """One in the first ten seconds, three in the others.

    The middle itself is where the last half begins.
    """
    forecast = Forecast("decoding", first=20.0, every=1.0)
    with caplog.at_level(logging.INFO):
        for now, done in ((0, 0), (10, 1), (20, 4), (30, 7)):
            clock[0] = now
            forecast.update(done, 7)
    assert [record.message for record in caplog.records] == [
        "decoding: 4 of 7, 3.3 seconds each, about 0:00:10 to go"
    ]


def test_without_progress_there_is_no_forecast(clock, caplog):
    forecast = Forecast("decoding")
    with caplog.at_level(logging.INFO):
        forecast.update(0, 5)
        clock[0] = 100.0
        forecast.update(0, 5)
    assert not caplog.records


def test_a_phase_at_another_pace_is_soon_seen(clock, caplog):
    forecast = Forecast("predicting")
    with caplog.at_level(logging.INFO):
        for done in range(400):  # the second half takes ten times as long
            clock[0] += 0.1 if done < 200 else 1.0
            forecast.update(done, 400)
    assert len(caplog.records) == 7  # at 10, 40, 70 and so on
    last = caplog.records[-1].message
    assert last.startswith("predicting: 371 of 400, 1.0 a second") and last.endswith(
        "about 0:00:29 to go"
    )


def test_a_thread_breaks_the_silence(caplog, monkeypatch):
    said = threading.Event()
    remind = Forecast.remind
    monkeypatch.setattr(Forecast, "remind", lambda *args: (remind(*args), said.set()))
    monkeypatch.setattr(forecast, "Forecast", partial(Forecast, every=0.0))
    with caplog.at_level(logging.INFO), progress("compiling", 3):
        assert said.wait(60)
    assert caplog.records[0].message.startswith("compiling: 0 of 3, 0:00:0")
