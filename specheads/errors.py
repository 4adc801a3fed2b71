"""The one error a user is meant to see: entry points print it without a traceback and exit with code 2."""

import errno
import os

import torch

# What a user can do about a system call that failed.
REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space, or write elsewhere with paths.data= and paths.outputs=",
    errno.ENOMEM: "the system has no memory left; close something, or use smaller batches",
    errno.EDQUOT: "the quota is used up; free some space, or write elsewhere with paths.data= and paths.outputs=",
    errno.EFBIG: "the file is larger than this process may write; raise the limit (ulimit -f), or write elsewhere",
    errno.EROFS: "it cannot be written to; give folders that can with paths.data= and paths.outputs=",
    errno.EACCES: "there is no permission; give folders that can be used with paths.data= and paths.outputs=",
    errno.EPERM: "there is no permission; give folders that can be used with paths.data= and paths.outputs=",
    errno.ENOTDIR: "a part of the path is a file; give folders with paths.data= and paths.outputs=",
    errno.EEXIST: "a file is where a folder should be; give folders with paths.data= and paths.outputs=",
    errno.EISDIR: "a folder is where a file should be; move it away",
    errno.ENAMETOOLONG: "the name is too long; give shorter ones with paths.data= and paths.outputs=",
}
GOES_ON = "With the same folders, the same command then goes on from what was finished."
NO_SPACE = ("No space left on device", "Disk quota exceeded")


class UserError(ValueError):
    """Something the user gave does not fit; the message names the value, what was expected and the remedy."""


def user_error(error: BaseException | None) -> UserError | None:
    """Return what to tell the user about an exception, or None where only a traceback helps.

    Looks through wrappers: hydra.utils.instantiate and libraries wrap what a constructor or a system call raises.
    """
    while error is not None:
        if isinstance(error, UserError):
            return error
        if is_out_of_memory(error):
            return UserError(
                f"out of memory ({(str(error).splitlines() or ['no details'])[0]}). Use smaller batches (generation.batch_size= where "
                "data is made, loader.batch_size= where heads or drafts are trained, write_batch_size= where drafts write, calibration.batch_size= and record.batch_size= where prompts are "
                "recorded), shorter responses (data.max_new_tokens=) or a smaller "
                "dtype (model.dtype=bfloat16). What was finished stays; other sizes make a cache or a run of their own."
            )
        if isinstance(error, OSError) and error.errno in REMEDIES:
            where = f"{error.filename}: " if error.filename else ""
            reason = os.strerror(error.errno)
            return UserError(f"{where}{reason}: {REMEDIES[error.errno]}. {GOES_ON}")
        if any(reason in str(error) for reason in NO_SPACE):  # libraries that lose the number on the way
            return UserError(f"{str(error).splitlines()[0]}: {REMEDIES[errno.ENOSPC]}. {GOES_ON}")
        error = error.__cause__
    return None


def is_number(value: object) -> bool:
    """Whether a config value is a number that is not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # noqa: PLR0124


def is_count(value: object, least: int = 0) -> bool:
    """Whether a config value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
