"""What a process does differently because a launcher has started several of them: only the first prints and logs."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator

from specheads.commands.agreement import begun, has_begun
from specheads.errors import UserError
from specheads.processes import Processes


@contextlib.contextmanager
def silent_others() -> Iterator[None]:
    """Let only the first process print what is not an error."""
    processes = Processes.this()
    if processes.launcher is None or processes.is_first:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def prepare_process() -> None:
    """Keep the log of the run to the first process, and let each process use a GPU of its own."""
    processes = Processes.this()
    if processes.launcher is None:
        return
    if not processes.is_first:
        root = logging.getLogger()
        for handler in [each for each in root.handlers if isinstance(each, logging.FileHandler)]:
            root.removeHandler(handler)
            handler.close()
    import torch  # slow, and not every command needs it

    if processes.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(processes.local_rank)


def leave(failed: bool) -> None:
    """End the talk with the other processes, if there was one."""
    if has_begun() and (agreement := begun()):
        agreement.leave(failed)


def tell(message: str) -> None:
    """Print the message of a mistake, once if all processes make it."""
    try:
        processes = Processes.this()
    except UserError:  # this is the mistake
        print(f"error: {message}", file=sys.stderr)
        return
    if processes.count == 1 or processes.is_first:
        print(f"error: {message}", file=sys.stderr)
        if has_begun() and (agreement := begun()):
            agreement.tell_failure(message)
    # Before the processes talk, mistakes are those of a command line that all have.
    elif has_begun() and (agreement := begun()) and not agreement.is_said_by_first(message):
        print(f"error in process {processes.rank} on {socket.gethostname()}: {message}", file=sys.stderr)
