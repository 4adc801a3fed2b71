import logging
import time

import pytest

from specheads.forecast import Forecast, duration


def test_the_remaining_time_is_logged_once_when_enough_is_done(monkeypatch, caplog):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    forecast = Forecast("decoding", wait=10)
    with caplog.at_level(logging.INFO):
        for now, done in ((5, 2), (10, 3), (25, 6), (40, 7)):  # the clock starts at (5, 2): 4 in 20 seconds
            clock[0] = now
            forecast.update(done, 50)
    assert [record.message for record in caplog.records] == ["decoding: about 3.7 min to go"]


def test_without_progress_there_is_no_forecast(monkeypatch, caplog):
    clock = iter([0.0, 100.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    forecast = Forecast("decoding")
    with caplog.at_level(logging.INFO):
        forecast.update(0, 5)
        forecast.update(0, 5)
    assert not caplog.records


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (89, "89 s"), (90, "1.5 min"), (7200, "2.0 h"), (3 * 86400, "3.0 days")]
)
def test_a_duration_is_text_in_seconds_minutes_hours_or_days(seconds, text):
    assert duration(seconds) == text
