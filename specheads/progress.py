"""What a command shows of its work: a line with a moving bar for the stage that runs, and a line
when it is done.

Without a terminal there are no bars, and none without rich, which decoders in other environments do
not have. The log, which bars do not reach, gets the remaining time.
"""

import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

logger = logging.getLogger(__name__)

Clock = Callable[[], float]  # seconds
# Takes how much more is done, and where that is not fixed, how much is left.
Advance = Callable[..., None]
Say = Callable[[str], None]

_NAME_WIDTH = 12  # columns of a stage's name
_TEXT_WIDTH = 54  # columns of what a stage made, before its seconds
_WIDEST_BAR = 24
_NARROWEST_BAR = 6
_REFRESH = 0.25  # seconds between two pictures of the bar
_LEAST_SECONDS = 2.0  # after the first step, from which on there is a pace
_FIRST_LOG = 10.0  # seconds until the log gets the remaining time
_EVERY_LOG = 30.0
_LATE = 2.0  # times the usual wait for the next step, after which the pace is no longer known

_lock = threading.Lock()  # the thread that draws shares works with those that do them


def duration(seconds: float) -> str:
    """Return how long something took: to the tenth of a second, the second or the minute."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rough_duration(seconds: float) -> str:
    """Return an estimated time, rounded up to ten seconds, and from two minutes on to minutes."""
    if seconds <= 110:
        return f"{max(10, 10 * math.ceil(seconds / 10))} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class _Point(NamedTuple):
    at: float  # seconds
    done: float


class Work:
    """Something that takes time: what it is, how much is done, and what remains.

    `total` is None where it is unknown: then the text is how long it has run.
    """

    def __init__(self, what: str, total: float | None, clock: Clock = time.perf_counter) -> None:
        self.what = what
        self.total = total
        self.done = 0.0
        self.clock = clock
        self.began = clock()
        self._points: deque[_Point] = deque()
        self._first_at: float | None = None
        self._log_at = self.began + _FIRST_LOG

    @property
    def seconds(self) -> float:
        return self.clock() - self.began

    def advance(self, count: float, left: float | None = None) -> None:
        """Report that `count` more is done, and with `left` that the total was only the most."""
        now = self.clock()
        self.done = round(self.done + count, 6)  # shares of a whole add up to it
        if left is not None:
            self.total = self.done + left
        self._points.append(_Point(now, self.done))
        if self._first_at is None:
            self._first_at = now
        # The pace is that of the last half of the time.
        middle = (self._first_at + now) / 2
        while len(self._points) > 1 and self._points[1].at <= middle:
            self._points.popleft()

    def seconds_left(self) -> float | None:
        """Return the remaining time.

        None before a pace is known, and where the next step takes much longer than those before.
        """
        if self.total is None or len(self._points) < 2:
            return None
        first = self._points[0]
        last = self._points[-1]
        taken = last.at - first.at
        gained = last.done - first.done
        if gained <= 0 or taken < _LEAST_SECONDS:
            return None
        waited = self.clock() - last.at
        of_step = taken / (len(self._points) - 1)
        if waited > max(_LATE * of_step, _LEAST_SECONDS):
            return None
        return max(0.0, (self.total - self.done) * taken / gained - waited)

    def text(self) -> str:
        """Return how much is done and the remaining time, or for how long it has run."""
        if self.total is None:
            return duration(math.floor(self.seconds)) if self.seconds >= 1 else ""
        if self.done >= self.total:
            return "finishing"
        share = f"{100 * self.done / self.total:.0f} %" if self.done else "0 %"
        left = self.seconds_left()
        if left is not None:
            return f"{share}, about {rough_duration(left)} left"
        return f"{share}, {duration(math.floor(self.seconds))} so far"

    def line_for_log(self) -> str | None:
        """Return the same with its name after ten seconds and every half minute; else None."""
        now = self.clock()
        if now < self._log_at:
            return None
        self._log_at = now + _EVERY_LOG
        return f"{self.what}: {self.text()}"


class Display:
    """The works of a process that run, of which the innermost is shown, next to the name of the
    outermost.
    """

    def __init__(self, console: "Console | None" = None, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._console = console
        self.tells = False  # whether stages that are done have lines: of commands, not of a library
        self._works: list[Work] = []
        self._is_silent = False  # as another process shows what runs
        self._live: Live | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def console(self) -> "Console | None":
        """Where lines go, above the bar where there is one; None without rich."""
        if self._live is not None:
            return self._live.console
        if self._console is None and find_spec("rich") is not None:
            from rich.console import Console

            return Console(highlight=False)
        return self._console

    def say(self, line: str, style: str = "") -> None:
        """Print a line, which a terminal folds and a file keeps whole."""
        console = self.console
        if console is None:
            print(line)
        else:
            console.print(line, markup=False, highlight=False, soft_wrap=True, style=style)

    def finished(self, name: str, text: str, seconds: float | None = None) -> None:
        """Print and log the line of a stage that is done."""
        took = "" if seconds is None else duration(seconds)
        line = f"{name:<{_NAME_WIDTH}} {text:<{_TEXT_WIDTH}} {took:>9}".rstrip()
        if self.tells:
            self.say(line)
        logger.info("done: %s", " ".join(line.split()))

    @contextmanager
    def stage(self, name: str) -> Iterator[Say]:
        """Show the works of the block as one stage, and when it is done a line with its seconds.

        Yield a function that takes what the stage made. A stage within a stage has no line.
        """
        is_outermost = not self._works
        made = ""

        def say(text: str) -> None:
            nonlocal made
            made = text

        with self.work(name, None) as work:
            yield say
        if is_outermost:
            self.finished(name, made, work.seconds)

    @contextmanager
    def work(self, what: str, total: float | None) -> Iterator[Work]:
        """Show a work while the block runs."""
        work = Work(what, None if total == math.inf else total, self.clock)
        with _lock:
            self._works.append(work)
        if len(self._works) == 1 and not self._is_silent:
            self._begin()
        try:
            yield work
        finally:
            with _lock:
                # Works that the block began and that an exception left end with it.
                del self._works[self._works.index(work) :]
            if not self._works:
                self._end()

    def line(self, width: int) -> "RenderableType":
        """Return what is shown while works run, in so many columns."""
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        if not self._works:
            return Text()
        stage = self._works[0]
        now = self._works[-1]
        parts = [now.text()]
        if now.what != stage.what:
            parts.insert(0, now.what)
        text = ", ".join(part for part in parts if part)
        room = width - max(_NAME_WIDTH, len(stage.what)) - 2 - len(text)
        bar = ProgressBar(
            total=now.total,
            completed=now.done,
            width=max(_NARROWEST_BAR, min(_WIDEST_BAR, room)),
            pulse=now.total is None,
        )
        grid = Table.grid(
            Column(min_width=_NAME_WIDTH, no_wrap=True),
            Column(),
            Column(no_wrap=True, overflow="ellipsis"),
            padding=(0, 1, 0, 0),
        )
        grid.add_row(Text(stage.what), bar, Text(text))
        return grid

    def tick(self) -> None:
        """Log the remaining time where it is due, and draw the bar again."""
        with _lock:
            if self._works and (line := self._works[-1].line_for_log()):
                logger.info("%s", line)
            if self._live is not None:
                self._live.refresh()

    def _begin(self) -> None:
        console = self.console
        if console is not None and console.is_interactive:
            from rich.live import Live

            self._live = Live(
                get_renderable=lambda: self.line(console.width),
                console=console,
                auto_refresh=False,
                transient=True,
            )
            self._live.start(refresh=True)
        self._ended = ended = threading.Event()

        def draw() -> None:
            while not ended.wait(_REFRESH):
                self.tick()

        self._thread = threading.Thread(target=draw, daemon=True)
        self._thread.start()

    def _end(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.stop()
        self._live = self._thread = None

    def be_silent(self) -> None:
        """Show nothing more: another process does."""
        self._works = []
        self._is_silent = True
        self.tells = False
        self._live = self._thread = None
        sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
        sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)


_display = Display()
stage = _display.stage
finished = _display.finished
be_silent = _display.be_silent


def tell_stages(tells: bool) -> None:
    """Print a line for each stage that is done, as commands do that write a run, or none."""
    _display.tells = tells


def _forked() -> None:
    _lock.release()
    _display.be_silent()


# A fork while the other thread draws would keep the console's locks for ever.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forked)


@contextmanager
def progress(what: str, total: float) -> Iterator[Advance]:
    """Show how much of `total` is done while the block runs, and log the remaining time.

    Yield a function that takes how much more is done, and where `total` is only the most, how much
    is left.
    """
    with _display.work(what, total) as work:

        def advance(count: float, left: float | None = None) -> None:
            with _lock:
                work.advance(count, left)

        yield advance


@contextmanager
def waiting(what: str) -> Iterator[Say]:
    """Say what is waited for while the block runs.

    Yield a function that takes another wording.
    """
    with _display.work(what, None) as work:

        def say(text: str) -> None:
            work.what = text

        yield say


class Warnings(logging.Handler):
    """Prints each warning once, above the bar; the other messages are for the log file."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if text not in self._said:
                self._said.add(text)
                _display.say(f"{record.levelname.lower()}: {text}", style="yellow")
        except Exception:  # noqa: BLE001 - as logging's handlers do
            self.handleError(record)
