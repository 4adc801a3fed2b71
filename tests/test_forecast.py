"""The remaining time, by a clock that the tests move."""

import logging
import time

import pytest

from specheads.forecast import Forecast, duration, rate


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_remaining_time_is_logged_when_enough_is_done_and_ever_more_rarely(clock, caplog):
    forecast = Forecast("decoding")
    with caplog.at_level(logging.INFO):
        # The clock starts at (5, 2). At 25, 3 were done in 15 seconds; at 65, 20 in 40.
        for now, done in ((5, 2), (10, 3), (25, 6), (40, 7), (65, 26), (80, 50)):
            clock[0] = now
            forecast.update(done, 50)
    assert [record.message for record in caplog.records] == [
        "decoding: 6 of 50, 12/min, about 3.7 min to go",
        "decoding: 26 of 50, 30/min, about 48 s to go",
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
    # Logged at 10, 20, 40, 80 and 160 seconds; from 80 on half of the time is of the slow phase.
    last = caplog.records[-1].message
    assert last.startswith("predicting: 340 of 400") and last.endswith("about 60 s to go")


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (89, "89 s"), (90, "1.5 min"), (7200, "2.0 h"), (3 * 86400, "3.0 days")]
)
def test_a_duration_is_text_in_seconds_minutes_hours_or_days(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("pace", "text"), [(1234.5, "1,234/s"), (1.25, "1.2/s"), (0.5, "30/min"), (0.001, "3.6/h"), (0, "0.0/h")]
)
def test_a_rate_is_text_per_second_minute_or_hour(pace, text):
    assert rate(pace) == text
