"""The remaining time of a long step: in a progress bar, and in the log, which a bar does not reach."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)


class Forecast:
    """Logs what is done, the pace and the remaining time after `first` seconds of the work, and then every `every` seconds.

    The first update only starts the clock: what comes before it, such as compilation, does not repeat. The pace is that of the
    last half of the time, as steps may become slower or faster.
    """

    def __init__(self, what: str, first: float = 10.0, every: float = 30.0) -> None:
        self.what, self.due, self.every = what, first, every
        self.start: float | None = None
        self.points: deque[tuple[float, float]] = deque()  # times, and what was done then

    def update(self, done: float, total: float) -> None:
        """Report that `done` of `total` is done, all of which takes equally long."""
        now = time.perf_counter()
        self.points.append((now, done))
        if self.start is None:
            self.start = now
        while len(self.points) > 1 and self.points[1][0] <= (self.start + now) / 2:
            self.points.popleft()
        seconds, progress = now - self.points[0][0], done - self.points[0][1]
        if progress > 0 and done < total and now - self.start >= self.due:
            left, pace = timedelta(seconds=round((total - done) * seconds / progress)), progress / seconds
            shown = f"{pace:,.1f} a second" if pace >= 1 else f"{1 / pace:,.1f} seconds each"
            logger.info("%s: %s of %s, %s, about %s to go", self.what, f"{done:,.0f}", f"{total:,.0f}", shown, left)
            self.due = now - self.start + self.every


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar while the block runs and log the remaining time; yield a function that advances the bar."""
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task, forecast = bar.add_task(what, total=total), Forecast(what)

        def advance(count: int) -> None:
            bar.advance(task, count)
            forecast.update(bar.tasks[0].completed, total)

        yield advance
