"""The remaining time of a long step: in a progress bar, and in the log, which a bar does not reach."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)


class Forecast:
    """Logs the remaining time after `first` seconds of the work, and again each time that as many have passed as before.

    The first update only starts the clock: what comes before it, such as compilation, does not repeat. The pace is that of the
    last half of the time, as steps may become slower or faster.
    """

    def __init__(self, what: str, first: float = 10.0) -> None:
        self.what, self.due = what, first
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
        if progress > 0 and seconds > 0:
            pace = progress / seconds
            self.log(now - self.start, (total - done) / pace, f"{done:,.0f} of {total:,.0f}, {rate(pace)}")

    def log(self, elapsed: float, left: float, reached: str) -> None:
        """Log the seconds `left` and a text of what was `reached`, if that is due."""
        if elapsed >= self.due and left > 0:
            logger.info("%s: %s, about %s to go", self.what, reached, duration(left))
            while self.due <= elapsed:
                self.due *= 2


def rate(pace: float) -> str:
    """Return a number per second as text, per minute or per hour where it is below 1."""
    seconds, name = next((each for each in ((1, "s"), (60, "min")) if pace * each[0] >= 1), (3600, "h"))
    number = pace * seconds
    return f"{number:,.0f}/{name}" if number >= 10 else f"{number:.1f}/{name}"


def duration(seconds: float) -> str:
    """Return a time as text: seconds, minutes, hours or days."""
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar while the block runs and log the remaining time; yield a function that advances the bar."""
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task, forecast = bar.add_task(what, total=total), Forecast(what)

        def advance(count: int) -> None:
            bar.advance(task, count)
            forecast.update(bar.tasks[0].completed, total)

        yield advance
