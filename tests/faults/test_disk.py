"""A disk that is full, or cannot be written to: one message, nothing half-written, and the same
command goes on later.
"""

import logging
import os
import shutil
import subprocess

import pytest

from specheads.commands.command import LogFile
from specheads.errors import UserError, user_error
from tests.mutations.kinds import KINDS

PAGE = 4096
WRITERS = ["head", "data set", "tensor shards", "recording", "journal", "run folder"]


def mounted(folder, *words):
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *words, str(folder)], check=False, capture_output=True)
    if done.returncode:
        pytest.skip("mounting needs root")


@pytest.fixture
def disk(tmp_path):
    """A disk of 4 MiB, of which `fill` leaves some free."""
    folder = tmp_path / "disk"
    mounted(folder, "-t", "tmpfs", "-o", "size=4m", "tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk, free):
    """Take all but `free` pages of a disk."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    if free is not None:
        left = shutil.disk_usage(disk).free
        with filler.open("wb") as stream:
            stream.write(bytes(max(0, left - free * PAGE)))


def error_of(make, folder):
    try:
        make(folder)
    except Exception as error:  # noqa: BLE001  # which is what this is about
        return error
    return None


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_told_and_later_the_work_goes_on(name, disk, tmp_path):
    kind = KINDS[name]
    told = 0
    (tmp_path / "whole").mkdir()
    kind.make(tmp_path / "whole")
    whole = kind.read(tmp_path / "whole")
    folder = disk / "folder"
    for free in (*range(9), 12, 16, 24, 32):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        fill(disk, free)
        error = error_of(kind.make, folder)
        assert error is None or "disk is full" in str(user_error(error)), repr(error)
        told += error is not None
        assert not list(folder.rglob("*.tmp"))
        fill(disk, None)
        if name != "run folder":  # the same process holds the lock of one that began
            kind.make(folder)
            assert kind.read(folder) == whole
    assert told


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_cannot_be_written_is_told(name, tmp_path):
    (folder := tmp_path / "read-only").mkdir()
    mounted(folder, "--bind", str(folder))
    try:
        mounted(folder, "-o", "remount,ro,bind")
        with pytest.raises((OSError, UserError)) as raised:
            KINDS[name].make(folder)
        assert "Read-only" in str(user_error(raised.value))
        assert "paths.data=" in str(user_error(raised.value))
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    assert os.listdir(folder) == []


def test_a_log_line_that_a_full_disk_does_not_take_is_left_out(capfd):
    log = LogFile("/dev/full")
    log.handle(logging.makeLogRecord({"msg": "a line"}))
    assert capfd.readouterr() == ("", "")
    log.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    assert "Logging error" in capfd.readouterr().err
    with pytest.raises(OSError, match="No space left"):
        log.close()
