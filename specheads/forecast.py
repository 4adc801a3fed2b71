"""The remaining time of a long step: in a progress bar, and in the log, which a bar does not
reach.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

logger = logging.getLogger(__name__)

_LEAST_SECONDS = 2.0  # after the first step, from which on there is a pace
# Takes how much more is done, and where that is not fixed, how much is left.
Advance = Callable[..., None]


class _Point(NamedTuple):
    at: float  # seconds
    done: float


class Forecast:
    """Logs what is done, the pace of the last half of the time, and the rest, after `first` seconds
    and every `every` seconds.
    """

    def __init__(self, what: str, first: float = 10.0, every: float = 30.0) -> None:
        self.what = what
        self.due = first
        self.every = every
        self.start: float | None = None
        self.points: deque[_Point] = deque()
        self.began = self.said = time.perf_counter()  # said: the time of the last line

    def update(self, done: float, total: float) -> None:
        """Report that `done` of `total` is done, all of which takes equally long."""
        now = time.perf_counter()
        self.points.append(_Point(now, done))
        if self.start is None:
            self.start = now
        while len(self.points) > 1 and self.points[1].at <= (self.start + now) / 2:
            self.points.popleft()
        text = self.remaining(done, total, now)
        if text is not None and done < total and now - self.start >= self.due:
            self._say(now, done, total, text)

    def remind(self, done: float, total: float) -> None:
        """Log the same if nothing was logged for `every` seconds, also where no pace is known
        yet.
        """
        now = time.perf_counter()
        if now - self.said >= self.every:
            waited = f"{timedelta(seconds=round(now - self.began))} so far"
            self._say(now, done, total, self.remaining(done, total, now) or waited)

    def remaining(self, done: float, total: float, now: float) -> str | None:
        """Return the pace and the remaining time; None before a pace is known."""
        if not self.points:
            return None
        first = self.points[0]
        last = self.points[-1]
        if done <= first.done or last.at - first.at < _LEAST_SECONDS:
            return None
        pace = (done - first.done) / (last.at - first.at)
        left = max(0.0, (total - done) / pace - (now - last.at))
        shown = f"{pace:,.1f} a second" if pace >= 1 else f"{1 / pace:,.1f} seconds each"
        return f"{shown}, about {timedelta(seconds=round(left))} to go"

    def _say(self, now: float, done: float, total: float, text: str) -> None:
        self.said = now
        if self.start is not None:
            self.due = now - self.start + self.every
        logger.info("%s: %s of %s, %s", self.what, f"{done:,.0f}", f"{total:,.0f}", text)


@contextmanager
def progress(what: str, total: float) -> Iterator[Advance]:
    """Show a progress bar while the block runs and log the remaining time.

    Yield a function that advances the bar.

    It takes how much more is done, and where `total` is only the most, how much is left.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(what, total=total, left="")
        forecast = Forecast(what)
        lock = threading.Lock()
        ended = threading.Event()

        done = 0.0

        def show() -> None:
            # Rich's forecast counts the time before the first step, which may be a compiler's.
            pace = forecast.remaining(done, total, time.perf_counter())
            left = (pace or "").partition(", ")[2]
            bar.update(task, completed=done, total=total, left=left)

        def advance(count: float, left: float | None = None) -> None:
            nonlocal done, total
            with lock:
                done = round(done + count, 6)  # shares of a whole add up to it
                total = total if left is None else done + left
                forecast.update(done, total)
                show()

        def remind() -> None:
            while not ended.wait(1.0):
                with lock:
                    forecast.remind(done, total)
                    show()

        thread = threading.Thread(target=remind, daemon=True)
        thread.start()
        try:
            yield advance
        finally:
            ended.set()
            thread.join()
