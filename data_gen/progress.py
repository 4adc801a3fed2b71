"""What a user sees while a data set is generated: its size at the start, then the progress."""

import logging
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from data_gen.rows import Shard
from data_gen.settings import Generation
from specheads.forecast import Forecast

logger = logging.getLogger(__name__)


def announce(folder: Path, shards: Collection[Shard], missing: Collection[Shard], settings: Generation) -> None:
    """Log how many tokens are to be generated and how much space they take; warn where the disk has less."""
    rows, rows_left = (sum(len(shard.prompts) for shard in some) for some in (shards, missing))
    logger.info("data: %d responses in %d shards, %d still to do, in %s", rows, len(shards), rows_left, folder)
    # Numbers of four bytes, before compression: nine per token and two for every further sample; for rollouts one, and two per
    # token.
    numbers = settings.max_new_tokens * (9 + 2 * (settings.samples_per_position - 1))
    numbers += settings.rollouts_per_response * (1 + 2 * settings.rollout_tokens)
    size = 4 * numbers * rows_left / 2**20
    logger.info("data: at most %d tokens to generate, at most %.0f MiB on disk", rows_left * settings.tokens_per_response, size)
    free = shutil.disk_usage(folder).free / 2**20
    if size > free:
        logger.warning("data: only %.0f MiB are free in %s; choose another folder with paths.data=", free, folder)


def progress_bar() -> Progress:
    """Return a bar with a speed and the remaining time."""
    return Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())


class Meter:
    """Moves a bar as tokens come; a row that has ended early counts as its whole limit."""

    def __init__(self, bar: Progress, total: int) -> None:
        self.bar, self.total = bar, total
        self.task = bar.add_task("responses", total=total, speed="")
        self.start = time.perf_counter()
        self.forecast = Forecast("data", wait=30)
        self.tokens = self.done = 0

    def add(self, made: int, done: int) -> None:
        """Count tokens that were made, and how many of the planned tokens are settled."""
        self.tokens += made
        self.done += done
        speed = self.tokens / (time.perf_counter() - self.start)
        self.bar.update(self.task, completed=self.done, speed=f"{speed:,.0f} tokens/s")
        self.forecast.update(self.done, self.total)
