"""Damaged files of every kind are refused in one message, or read as before: no other error, and
nothing wrong in silence.

`SPECHEADS_MUTATIONS` is the number of mutations of each kind.
"""

import os
import random
import shutil
import traceback
from collections import Counter

import pytest

from specheads.errors import user_error
from tests.mutations.kinds import KINDS
from tests.mutations.mutate import mutated

NUMBER = int(os.environ.get("SPECHEADS_MUTATIONS", "50"))


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_refused_or_read_as_before(name, tmp_path):
    kind = KINDS[name]
    made = tmp_path / "made"
    trial = tmp_path / "trial"
    made.mkdir()
    kind.make(made)
    contents = {path: (made / path).read_bytes() for path in matching(made, ["**/*"])}
    write(trial, contents)
    before = kind.read(trial)
    names = matching(made, kind.files)
    checked = matching(made, kind.checked)
    rng = random.Random(0)
    counts = Counter()
    failures = []
    for number in range(max(1, round(NUMBER * kind.share))):
        path = names[number % len(names)]
        others = [contents[other] for other in names if other != path]
        mutation, content = mutated(rng, contents[path], others)
        write(trial, contents | {path: content})
        result = read_again(kind, trial, before, path in checked)
        counts[result] += 1
        if result not in ("refused", "as before", "another value"):
            failures.append(f"{path}, number {number} ({mutation}): {result}")
    assert not failures, "\n\n".join(failures[:3])
    assert counts["refused"] + counts["as before"] > 0


def matching(folder, patterns):
    """Return the files that match a pattern, relative to the folder."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder) for path in paths)


def write(folder, contents):
    """Write files into an empty folder, but those that are None."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)


def read_again(kind, folder, before, is_checked):
    """Return what a reader said of a file that was damaged."""
    try:
        after = kind.read(folder)
    except Exception as error:  # noqa: BLE001  # which is what this is about
        message = str(error)
        if isinstance(error, kind.refusals) and message and not isinstance(error, UnicodeError):
            return "refused"
        said = user_error(error)
        if said is not None and "out of memory" not in str(said):
            return "refused"
        return "".join(traceback.format_exception(error, limit=-4))
    if after == before:
        return "as before"
    return f"read in silence as {after!r:.500}" if is_checked else "another value"
