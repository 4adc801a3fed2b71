"""What a user sees while a data set is generated: its size at the start, then the progress."""

import logging
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from data_gen.rows import Shard
from data_gen.settings import Generation
from specheads.forecast import Forecast, duration

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
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TextColumn("{task.fields[speed]}"), TextColumn("{task.fields[left]}"))


class Meter:
    """Moves a bar as responses end, and says how long the rest will take.

    Responses, labels and rollouts differ in pace, so each has a clock of its own. How long responses become is not known
    beforehand; the tokens made so far over the responses that have ended is an estimate that also counts those still under way.
    """

    def __init__(self, bar: Progress, num_rows: int, most: int, rolled_out: bool) -> None:
        """Begin with nothing done.

        Args:
            most: the longest response, in tokens.
            rolled_out: whether responses get rollouts.
        """
        self.bar, self.num_rows, self.most, self.rolled_out = bar, num_rows, most, rolled_out
        what = "responses, rollouts" if rolled_out else "responses"
        self.task = bar.add_task(what, total=num_rows * (1 + rolled_out), speed="", left="")
        self.forecast = Forecast("data")
        self.start = self.last = time.perf_counter()
        self.seconds = {"responses": 0.0, "rollouts": 0.0, "labels": 0.0}
        self.rows = {"responses": 0, "rollouts": 0, "labels": 0}
        self.tokens = self.copied = self.elsewhere = 0

    def add(self, made: int, ended: int) -> None:
        """Count tokens that were made, and responses that ended with them; without tokens, responses that were known."""
        self._count("responses", ended)
        self.tokens += made
        self.copied += ended if not made else 0
        self._show()

    def skip(self, rows: int) -> None:
        """Count responses that another worker has finished."""
        self.elsewhere += rows
        self.last = time.perf_counter()  # waiting for it says nothing of this one's pace
        self._show()

    def add_rollouts(self, rows: int) -> None:
        """Count responses that have their rollouts."""
        self._count("rollouts", rows)
        self._show()

    def add_labels(self, rows: int) -> None:
        """Count responses that are complete."""
        self._count("labels", rows)

    def left(self) -> float | None:
        """Return the seconds that the rest will take, if other workers go on as they have done; None if nothing is known yet."""
        mine = self._left_alone(self.num_rows - self.elsewhere)
        rows = self.rows["labels"]
        return None if mine is None else mine * rows / (rows + self.elsewhere) if rows else mine

    def _left_alone(self, num_rows: int) -> float | None:
        """Return the seconds that the rest of so many responses would take without other workers."""
        if self.rolled_out and not self.rows["rollouts"]:
            return None
        seconds = 0.0
        for phase in ("rollouts", "labels"):
            if done := self.rows[phase]:
                seconds += (num_rows - done) * self.seconds[phase] / done
        wanted, ended = num_rows - self.copied, self.rows["responses"] - self.copied
        if not self.tokens:
            return seconds if self.copied == num_rows and self.rows["labels"] else None
        length = min(self.most, self.tokens / ended) if ended else self.most
        return seconds + max(0.0, wanted * length - self.tokens) * self.seconds["responses"] / self.tokens

    def _count(self, phase: str, rows: int) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.rows[phase] += rows
        self.last = now

    def _show(self) -> None:
        pace, left = self.tokens / max(1e-9, self.seconds["responses"]), self.left()
        speed = f"{pace:,.0f} tokens/s" if self.tokens else ""
        text = f"{duration(left)} to go" if left else ""
        self.bar.update(
            self.task,
            completed=self.rows["responses"] + self.rows["rollouts"] + self.elsewhere * (1 + self.rolled_out),
            speed=speed,
            left=text,
        )
        if left is not None:
            reached = f"{self.rows['responses'] + self.elsewhere:,} of {self.num_rows:,} responses{', ' if speed else ''}{speed}"
            self.forecast.log(self.last - self.start, left, reached)
