"""The error that users see: entry points print it without a traceback and exit with code 2."""

import errno
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TypeGuard

EXIT_USER_ERROR = 2
_RESUMES = "and the same command resumes"
# What a user can do about a system call, if it is not to give other folders.
_REMEDIES = {
    errno.ENOSPC: f"the disk is full; free some space, {_RESUMES}",
    errno.EDQUOT: f"the quota is used up; free some space, {_RESUMES}",
    errno.ENOMEM: f"close other programs, or use smaller batches, {_RESUMES}",
    errno.EFBIG: f"raise the limit (ulimit -f), {_RESUMES}",
}
_OTHER_FOLDERS = "give other folders with paths.data= and paths.outputs="


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
                f"out of memory ({_first_line(error) or type(error).__name__}). Use smaller batches"
                " (generation.batch_size= for data and recordings, loader.batch_size= with"
                " trainer.accumulate_grad_batches= for training), gradient_checkpointing=true for"
                " distilling, shorter responses (data.max_new_tokens=) or model.dtype=bfloat16."
            )
        if text := _failure(error):
            return UserError(text)
        error = error.__cause__
    return None


def _failure(error: BaseException) -> str | None:
    """Return what failed in the system, and what a user can do about it."""
    text = _first_line(error)
    if isinstance(error, OSError) and error.errno and (error.filename or error.errno in _REMEDIES):
        is_full = error.errno in _REMEDIES
        file = (error.filename2 if is_full else None) or error.filename  # of a copy, the new file
        where = f"{file}: " if file else ""
        remedy = _REMEDIES.get(error.errno, _OTHER_FOLDERS)
        return f"{where}{os.strerror(error.errno)}: {remedy}."
    # Libraries that do not pass on the error's number or the file's name
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return f"{text}: {_REMEDIES[errno.ENOSPC]}."
    if isinstance(error, FileNotFoundError) and text:
        return f"{text}: run the same command again, which makes it again."
    return None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


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


def closest(name: str, known: Sequence[str]) -> str:
    """Return a question with the known names that end or begin as `name`, or else the one most like
    it; "" if none is.
    """
    if not name:
        return ""
    close = [each for each in known if each.endswith(f".{name}")]
    close = close or [each for each in known if each.startswith(name)]
    close = close[:3] or get_close_matches(name, known, 1, cutoff=0.5)
    return f"did you mean {' or '.join(close)}? " if close else ""
