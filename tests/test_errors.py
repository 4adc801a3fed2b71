"""Which exceptions become a message for the user, and what it names."""

import errno
import os
from pathlib import Path

import pytest

from specheads.errors import UserError, user_error


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_a_folder_that_cannot_be_made_is_named_with_the_remedy():
    with pytest.raises(OSError, match="/proc/none") as refused:
        Path("/proc/none/head").mkdir(parents=True)
    message = str(user_error(refused.value))
    assert message.startswith("/proc/none: No such file or directory: give other folders")
    assert message.endswith("paths.outputs=.")


@pytest.mark.parametrize(
    "number", [errno.EINVAL, errno.EIO, errno.ELOOP, errno.ENODEV, errno.EBUSY, errno.ESTALE]
)
def test_every_failure_on_a_file_is_a_message_that_names_it(number):
    message = str(user_error(OSError(number, os.strerror(number), "somewhere/data")))
    assert (
        message.startswith(f"somewhere/data: {os.strerror(number)}: ") and "paths.data=" in message
    )


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


def test_after_a_full_disk_the_same_command_resumes():
    message = str(user_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "data/shard")))
    assert (
        message.startswith("data/shard: No space left on device: the disk is full; ")
        and "resumes" in message
    )
