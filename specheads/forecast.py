"""The remaining time of a long step: in a progress bar, and in the log, which a bar does not
reach.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

_FIRST = 10.0  # seconds after the first step, which may be a compiler's
_EVERY = 30.0
# Takes how much more is done, and where that is not fixed, how much is left.
Advance = Callable[..., None]


class Forecast:
    """Logs every half minute what is done, and how long the rest takes at the mean pace."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.start: float | None = None  # seconds
        self.done_at_start = 0.0
        self.due = 0.0

    def update(self, done: float, total: float) -> None:
        """Report that `done` of `total` is done."""
        now = time.perf_counter()
        if self.start is None:
            self.start = now
            self.done_at_start = done
            self.due = now + _FIRST
        elif now >= self.due and self.done_at_start < done < total:
            self.due = now + _EVERY
            left = (now - self.start) / (done - self.done_at_start) * (total - done)
            rest = timedelta(seconds=round(left))
            logger.info("%s: %.0f of %.0f, about %s to go", self.what, done, total, rest)


@contextmanager
def progress(what: str, total: float) -> Iterator[Advance]:
    """Show a progress bar while the block runs and log the remaining time.

    Yield a function that advances the bar.

    It takes how much more is done, and where `total` is only the most, how much is left.
    """
    forecast = Forecast(what)
    done = 0.0
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    ) as bar:
        task = bar.add_task(what, total=total)

        def advance(count: float, left: float | None = None) -> None:
            nonlocal done, total
            done = round(done + count, 6)  # shares of a whole add up to it
            total = total if left is None else done + left
            forecast.update(done, total)
            bar.update(task, completed=done, total=total)

        yield advance
