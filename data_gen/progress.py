"""What a user sees while a data set is generated: its size at the start, then the progress of responses."""

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from data_gen.settings import Generation
from specheads.forecast import Forecast, duration

logger = logging.getLogger(__name__)


def announce(stage: str, folder: Path, rows: int, rows_left: int, settings: Generation) -> None:
    """Log how many responses are to be made or labelled, and how much space they take; warn where the disk has less."""
    logger.info("data: %s of %d prompts, %d still to do, in %s", stage, rows, rows_left, folder)
    # Numbers of four bytes, before compression: nine per token and two for every further sample.
    numbers = 9 + 2 * (settings.samples_per_position - 1) if stage == "labels" else 1
    size = 4 * numbers * settings.max_new_tokens * rows_left / 2**20
    logger.info("data: at most %.0f MiB on disk", size)
    free = shutil.disk_usage(folder).free / 2**20
    if size > free:
        logger.warning("data: only %.0f MiB are free in %s; choose another folder with paths.data=", free, folder)


class Meter:
    """Moves a bar as responses end, and says how long the rest will take.

    How long responses become is not known beforehand; the tokens made so far over the responses that have ended is an estimate
    that also counts those still under way. A context manager, which gives the function `add`.
    """

    def __init__(self, num_rows: int, most: int) -> None:
        """Begin with nothing done; `most` is the longest response, in tokens."""
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._bar = Progress(*columns, TextColumn("{task.fields[speed]}"), TextColumn("{task.fields[left]}"))
        self._task = self._bar.add_task("responses", total=num_rows, speed="", left="")
        self._forecast = Forecast("responses")
        self._num_rows, self._most = num_rows, most
        self._start = time.perf_counter()
        self._tokens = self._ended = self._copied = 0

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.start()
        return self.add

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def add(self, made: int, ended: int) -> None:
        """Count tokens that were made, and responses that ended with them; without tokens, responses that were known."""
        self._tokens += made
        self._ended += ended
        self._copied += ended if not made else 0
        seconds, left = time.perf_counter() - self._start, self.left()
        speed = f"{self._tokens / max(1e-9, seconds):,.0f} tokens/s" if self._tokens else ""
        self._bar.update(self._task, completed=self._ended, speed=speed, left=f"{duration(left)} to go" if left else "")
        if left is not None:
            self._forecast.log(seconds, left, f"{self._ended:,} of {self._num_rows:,} responses, {speed}")

    def left(self) -> float | None:
        """Return the seconds that the rest will take; None if nothing is known yet."""
        if not self._tokens:
            return None
        ended = self._ended - self._copied
        length = min(self._most, self._tokens / ended) if ended else self._most
        tokens = max(0.0, (self._num_rows - self._copied) * length - self._tokens)
        return tokens * (time.perf_counter() - self._start) / self._tokens
