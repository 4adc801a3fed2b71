"""Which exceptions become a message for the user, and what it names."""

import errno
import os
import re

import pytest
import torch

from specheads.errors import UserError, user_error

SMALLER = r"out of memory \(.*generation\.batch_size=.*data\.max_new_tokens="
NO_MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"


def on_file(number):
    return OSError(number, os.strerror(number), "some/data")


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        (on_file(errno.ENOENT), "some/data: No such .*: give other folders .*paths.outputs=.$"),
        (on_file(errno.EIO), "some/data: Input/output error: .*paths.data="),
        (on_file(errno.ESTALE), "some/data: Stale file handle: .*paths.data="),
        (on_file(errno.ENOSPC), "some/data: No space left on device: the disk is full; .*resumes"),
        (
            OSError(errno.ENOSPC, "full", "/tmp/a", None, "some/data"),  # of a copy
            "some/data: No space left on device: the disk is full",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), SMALLER),
        (MemoryError(), SMALLER),
        (RuntimeError(NO_MEMORY), SMALLER),
    ],
)
def test_a_failure_of_the_machine_is_a_message_with_the_remedy(error, pattern):
    assert re.match(pattern, str(user_error(error)))


def test_the_cause_of_a_wrapped_error_is_found():
    wrapped = RuntimeError("in a constructor")
    wrapped.__cause__ = UserError("depth=-1 must be at least 0.")
    assert user_error(wrapped) is wrapped.__cause__


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a bug"), OSError("no number"), ConnectionError(), OSError(errno.EPIPE, "pipe")],
)
def test_other_errors_keep_their_traceback(error):
    assert user_error(error) is None
