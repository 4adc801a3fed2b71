"""Several processes on one folder make a data set together: the same bytes, nothing twice, nothing lost with one that dies."""

from pathlib import Path

import pytest
from commands import wait_for
from warm_processes import server

WORKER = Path(__file__).with_name("sharing_worker.py")
NUM_SHARDS = 8


def start(root, seconds_per_shard=0.2, *more):
    return server().start(root.parent, WORKER, root, seconds_per_shard, *more)


def output_of(process):
    done = process.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def content(root):
    (folder,) = root.iterdir()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def made(output):
    return [line for line in output.splitlines() if line.startswith("making")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    root = tmp_path_factory.mktemp("alone")
    assert len(made(output_of(start(root, 0.0)))) == NUM_SHARDS
    return content(root)


def test_two_processes_share_a_data_set_and_write_the_bytes_of_one(alone, tmp_path):
    outputs = [output_of(process) for process in [start(tmp_path), start(tmp_path)]]
    shards = [shard for output in outputs for shard in made(output)]
    assert len(set(shards)) == len(shards) == NUM_SHARDS
    assert content(tmp_path) == alone


def test_a_killed_process_costs_the_shard_that_it_was_making(alone, tmp_path):
    first = start(tmp_path, 600.0)
    wait_for(lambda: made(first.stdout))
    second = start(tmp_path, 0.0)
    wait_for(lambda: "waiting for other workers" in second.stdout)
    (shard,) = made(first.kill().stdout)
    rest = output_of(second)
    assert f"its worker, process {first.pid}, has ended" in rest and shard in made(rest)
    assert content(tmp_path) == alone


def test_a_worker_with_a_full_disk_ends_with_a_message_and_the_others_go_on(alone, tmp_path):
    first, second = start(tmp_path, 0.2, "full"), start(tmp_path)
    done = first.wait()
    assert done.returncode == 2 and len(made(done.stdout)) == 1
    assert "No space left on device: the disk is full; free some space" in done.stdout.splitlines()[-1]
    assert len(made(output_of(second))) == NUM_SHARDS
    assert content(tmp_path) == alone
