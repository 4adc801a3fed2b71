"""Ctrl-C and SIGTERM: the first ends a run cleanly, the second ends it immediately.

Most code may stop anywhere, because a half-written file does not have its final name yet; what must
save runs under `deferred`.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interrupted(BaseException):
    """The user or the system asked this run to end.

    `exit_code` follows the shell's convention for signals.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {SIGNALS[signal.Signals(number)]}")
        self.number = number
        self.exit_code = 128 + number


class Request:
    """The signal that came while signals were deferred, if any."""

    number: int | None = None


_deferred: Request | None = None


def listen(handler: Callable[[int, FrameType | None], None] | None = None) -> None:
    """Install the handlers, from the main thread.

    Signals that this process ignores from its start stay ignored.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler or _handle)


def end_at_once() -> None:
    """Let a signal end the process where an exception would be caught or traced: before the
    imports, and after a run.
    """

    def end(number: int, frame: FrameType | None) -> None:
        interruption = Interrupted(number)
        os.write(2, f"{interruption}\n".encode())
        os._exit(interruption.exit_code)

    listen(end)


def listen_again(request: Request) -> None:
    """Install the handlers again after a library has replaced them, unless a signal has come
    already.
    """
    if _deferred is request and request.number is None:
        listen()


def _handle(number: int, frame: FrameType | None) -> None:
    for handled in SIGNALS:
        signal.signal(handled, signal.SIG_DFL)  # a second signal ends the process immediately
    if _deferred is None:
        raise Interrupted(number)
    _deferred.number = number


@contextlib.contextmanager
def deferred() -> Iterator[Request]:
    """Let the block finish before a signal ends the run; it may check the yielded request.

    `Interrupted` is raised at its end.
    """
    global _deferred
    request = _deferred = Request()
    try:
        yield request
    except SystemExit:  # a library ends the process itself; ours names the signal
        if request.number is None:
            raise
    finally:
        _deferred = None
    if request.number is not None:
        raise Interrupted(request.number)
