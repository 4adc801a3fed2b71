"""The remaining time, by a clock that the tests move."""

import logging
import time

import pytest

from specheads.forecast import Forecast


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_remaining_time_is_logged_when_enough_is_done_and_every_half_minute(clock, caplog):
    forecast = Forecast("decoding")
    with caplog.at_level(logging.INFO):
        # The clock starts at (5, 2).
        for now, done in ((5, 2), (10, 3), (25, 6), (40, 7), (65, 26), (100, 50)):
            clock[0] = now
            forecast.update(done, 50)
    assert [record.message for record in caplog.records] == [
        "decoding: 6 of 50, about 0:03:40 to go",
        "decoding: 26 of 50, about 0:01:00 to go",
    ]


def test_without_progress_there_is_no_forecast(clock, caplog):
    forecast = Forecast("decoding")
    with caplog.at_level(logging.INFO):
        forecast.update(0, 5)
        clock[0] = 100.0
        forecast.update(0, 5)
    assert not caplog.records
