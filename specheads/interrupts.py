"""Ctrl-C and SIGTERM: the first ends a run in order, the second at once.

Most code stops where it is: whatever is half done is not yet under its final name. A stretch that has something to save
first runs under `deferred`, sees the request, saves and raises `Interrupted` itself.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interrupted(BaseException):
    """The user or the system asked this run to end; `exit_code` is the shell's convention for the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {SIGNALS[signal.Signals(number)]}")
        self.exit_code = 128 + number


class Request:
    """Whether a signal came while it was deferred."""

    def __init__(self) -> None:
        self.number: int | None = None

    def obey(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.number is not None:
            raise Interrupted(self.number)


_deferred: Request | None = None


def listen() -> None:
    """Install the handlers, from the main thread; a signal that this process was started to ignore stays ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)


def listen_again(request: Request) -> None:
    """Take the signals back from a library that put its own handlers, unless one has come already."""
    if _deferred is request and request.number is None:
        listen()


def _handle(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)  # a second signal ends the process at once
    if _deferred is None:
        raise Interrupted(number)
    _deferred.number = number


@contextlib.contextmanager
def deferred() -> Iterator[Request]:
    """Give the block the time to end in order: it asks the yielded request; what it did not obey is raised at its end."""
    global _deferred
    request = _deferred = Request()
    try:
        yield request
    except SystemExit:  # a library's way to end, which says less than ours
        request.obey()
        raise
    finally:
        _deferred = None
    request.obey()
