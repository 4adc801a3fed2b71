"""Two processes that need the same data set: one waits for the other, and nothing is lost with one
that dies.
"""

from pathlib import Path

import pytest
from commands import wait_for
from warm_processes import server

WORKER = Path(__file__).with_name("sharing_worker.py")
NUM_SHARDS = 4


def start(root, seconds_per_shard=0.2, *more):
    return server().start(root.parent, WORKER, root, seconds_per_shard, *more)


def output_of(process):
    done = process.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def content(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def made(output):
    return [line for line in output.splitlines() if line.startswith("making")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    root = tmp_path_factory.mktemp("alone")
    assert len(made(output_of(start(root, 0.0)))) == NUM_SHARDS
    return content(root)


def test_the_second_process_waits_and_finds_what_the_first_has_made(alone, tmp_path):
    outputs = [output_of(process) for process in [start(tmp_path), start(tmp_path)]]
    assert sorted(len(made(output)) for output in outputs) == [0, NUM_SHARDS]
    assert content(tmp_path) == alone


def test_a_killed_process_costs_the_shard_that_it_was_making(alone, tmp_path):
    first = start(tmp_path, 600.0)
    wait_for(lambda: made(first.stdout))
    second = start(tmp_path, 0.0)
    wait_for(lambda: "waiting for another process, which is at work in" in second.stdout)
    (shard,) = made(first.kill().stdout)
    assert shard in made(output_of(second))
    assert content(tmp_path) == alone


def test_a_process_with_a_full_disk_ends_with_a_message_and_the_next_one_goes_on(alone, tmp_path):
    done = start(tmp_path, 0.0, "full").wait()
    assert done.returncode == 2 and not made(done.stdout)
    assert (
        "No space left on device: the disk is full; free some space" in done.stdout.splitlines()[-1]
    )
    assert len(made(output_of(start(tmp_path, 0.0)))) == NUM_SHARDS
    assert content(tmp_path) == alone
