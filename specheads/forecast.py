"""The remaining time of a long step, logged once, because a progress bar does not reach a log file."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)


class Forecast:
    """Logs the remaining time once, after `wait` seconds of the work; the first update only starts the clock."""

    def __init__(self, what: str, wait: float = 10.0) -> None:
        self.what, self.wait = what, wait
        self.start: tuple[float, float] | None = None
        self.logged = False

    def update(self, done: float, total: float) -> None:
        """Report that `done` of `total` is done."""
        now = time.perf_counter()
        if self.start is None:
            self.start = (now, done)
            return
        elapsed, progress = now - self.start[0], done - self.start[1]
        if not self.logged and elapsed >= self.wait and progress > 0:
            self.logged = True
            logger.info("%s: about %s to go", self.what, duration(elapsed / progress * (total - done)))


def duration(seconds: float) -> str:
    """Return a time as text: seconds, minutes, hours or days."""
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar while the block runs and log the remaining time once; yield a function that advances the bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task, forecast = bar.add_task(what, total=total), Forecast(what)

        def advance(count: int) -> None:
            bar.advance(task, count)
            forecast.update(bar.tasks[0].completed, total)

        yield advance
