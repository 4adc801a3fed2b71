"""The error that users see: entry points print it without a traceback and exit with code 2."""

import errno
import os
import sys
from typing import TypeGuard

EXIT_USER_ERROR = 2
_OTHER_FOLDERS = "give other folders with paths.data= and paths.outputs="
_NO_SPACE = f"free some space, or {_OTHER_FOLDERS}"
# What a user can do about a system call that failed, where it is not to give other folders.
_REMEDIES = {
    errno.ENOSPC: f"the disk is full; {_NO_SPACE}",
    errno.EDQUOT: f"the quota is used up; {_NO_SPACE}",
    errno.ENOMEM: "the system has no memory left; close other programs, or use smaller batches",
    errno.EFBIG: (
        "the file is larger than this process may write; raise the limit (ulimit -f), or write to"
        " another disk"
    ),
    errno.EROFS: f"it cannot be written to; {_OTHER_FOLDERS}",
    errno.EACCES: f"there is no permission; {_OTHER_FOLDERS}",
    errno.EPERM: f"there is no permission; {_OTHER_FOLDERS}",
    errno.ENOENT: f"it does not exist and cannot be made there; {_OTHER_FOLDERS}",
    errno.ENOTDIR: f"a part of the path is a file; {_OTHER_FOLDERS}",
    errno.EEXIST: f"a file is where a folder should be; {_OTHER_FOLDERS}",
    errno.EISDIR: "a folder is where a file should be; move it away",
}
# Failures after which the same folders can be used.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_RESUMES = "The same command with the same folders then resumes from what is finished."


class UserError(ValueError):
    """A mistake in what the user gave.

    The message names the value, what was expected and the remedy.
    """


def user_error(error: BaseException | None) -> UserError | None:
    """Return the message for the user about an exception or one of its causes, or None if only a
    traceback helps.
    """
    while error is not None:
        if isinstance(error, UserError):
            return error
        if is_out_of_memory(error):
            return UserError(
                f"out of memory ({(str(error).splitlines() or ['no details'])[0]}). Use smaller"
                " batches (generation.batch_size= for generating data and recording prompts;"
                " loader.batch_size= for training, and trainer.accumulate_grad_batches= for as"
                " many rows per step), gradient_checkpointing=true for distilling, shorter"
                " responses (data.max_new_tokens=) or a smaller dtype (model.dtype=bfloat16)."
                " Finished work is kept; other sizes make another cache or run."
            )
        if (
            isinstance(error, OSError)
            and error.errno
            and (error.filename or error.errno in _REMEDIES)
        ):
            where = f"{error.filename}: " if error.filename else ""
            resumes = f" {_RESUMES}" if error.errno in _FULL else ""
            return UserError(
                f"{where}{os.strerror(error.errno)}:"
                f" {_REMEDIES.get(error.errno, _OTHER_FOLDERS)}.{resumes}"
            )
        # Some libraries do not pass the file's name on.
        if isinstance(error, FileNotFoundError) and str(error):
            return UserError(
                f"{str(error).splitlines()[0]}: it was there before; run the same command again,"
                " which makes it again."
            )
        # From libraries that do not pass the error number on.
        if any(
            reason in str(error) for reason in ("No space left on device", "Disk quota exceeded")
        ):
            return UserError(f"{str(error).splitlines()[0]}: {_REMEDIES[errno.ENOSPC]}. {_RESUMES}")
        error = error.__cause__
    return None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a config value is a number that is not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # noqa: PLR0124


def is_count(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether a config value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU."""
    # Importing it takes a second, and without it there is no such error.
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (
        torch is not None and isinstance(error, torch.OutOfMemoryError)
    ):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
