"""A clock that is set back between two runs, or during one, changes nothing."""

import time

import pytest
from fakes import release_runs

from specheads.storage import runs


@pytest.fixture
def clock(monkeypatch):
    """A function that sets the clock of the day."""
    real = time.strftime

    def set_to(seconds):
        monkeypatch.setattr(time, "time", lambda: seconds)
        monkeypatch.setattr(
            time, "strftime", lambda form, *when: real(form, *(when or [time.gmtime(seconds)]))
        )

    yield set_to
    release_runs()


def begun(parent, key="key"):
    folder = runs.run_folder(parent, key)
    runs.begin(folder, key)
    release_runs()  # as at the end of the process
    return folder


def test_an_interrupted_run_that_seems_older_than_a_finished_one_is_resumed(clock, tmp_path):
    clock(2_000_000_000)
    runs.finish(begun(tmp_path))
    clock(1_000_000_000)
    interrupted = begun(tmp_path)
    assert not runs.is_resumed(interrupted)
    clock(1_500_000_000)
    assert begun(tmp_path) == interrupted and runs.is_resumed(interrupted)
    runs.finish(interrupted)
    clock(500_000_000)
    assert begun(tmp_path) not in (interrupted, *sorted(tmp_path.iterdir())[1:])


def test_the_tenth_run_of_a_second_is_newer_than_the_second(clock, tmp_path):
    clock(1_000_000_000)
    folders = [begun(tmp_path, f"{number}") for number in range(10)]
    runs.finish(folders[1])
    for folder in folders:
        runs.write_json(folder / runs.STATE, {**runs.read_state(folder), "key": "key"})
    assert begun(tmp_path) == folders[-1]
