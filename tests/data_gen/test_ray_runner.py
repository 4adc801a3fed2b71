import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from data_gen import ray_runner
from data_gen.ray_runner import UnfitWorker, on_workers
from data_gen.settings import Generation
from specheads.errors import UserError
from specheads.storage.leases import packages_here

ROOT = Path(__file__).parents[2]
WORDS = ["model=nano", "data.num_train=6", "data.num_dev=2", "data.num_test=2", "data.max_new_tokens=8"]
WORDS += ["generation.rows_per_shard=2", "generation.batch_size=2"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def check(folder, **changes):
    sign = folder / ".ray-0"
    sign.touch()
    return {"sign": str(sign), "packages": packages_here(), "host": "driver", "folder": str(folder), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"packages": packages_here() | {"torch": "1.0"}},
            r"the worker on \S+ has torch .*, driver has torch 1\.0; install",
        ),
        ({"sign": "/no/such/folder/.ray-0"}, "does not see /no/such/folder of driver; give a folder that all machines share"),
    ],
)
def test_a_worker_that_cannot_take_part_says_why(tmp_path, changes, message):
    with pytest.raises(UnfitWorker, match=message):
        ray_runner._worker(lambda argument: pytest.fail("it works"), {}, 0, check(tmp_path, **changes))


def test_a_mistake_of_a_worker_names_its_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fail(argument):
        raise UserError("data.num_train=-1 is wrong")

    with pytest.raises(UserError, match=f"{socket.gethostname()}: data.num_train=-1 is wrong"):
        ray_runner._worker(fail, {}, 1, check(tmp_path))
    assert ray_runner._worker(lambda argument: argument["a"], {"a": 5}, 1, check(tmp_path)) == 5


def test_without_ray_the_message_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"there is no Ray here; run pip install 'specheads\[ray\]'"):
        on_workers(Generation(runner="ray"), tmp_path, len, {})


class StandIn:
    """As much of Ray as a driver meets: tasks are functions that return a result or raise."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            def __init__(self, cause):
                self.cause = cause

    def __init__(self, resources):
        self.resources = resources

    def wait(self, tasks, timeout):
        return tasks[:1], tasks[1:]

    def get(self, task):
        if isinstance(task, Exception):
            raise self.exceptions.RayTaskError(task) if isinstance(task, UserError) else task
        return task

    def cluster_resources(self):
        return self.resources


def test_the_first_result_counts_and_failures_of_some_workers_do_not(caplog):
    ray = StandIn({})
    full = UserError("node3: No space left on device")
    with caplog.at_level(logging.WARNING):
        assert ray_runner._first_result(ray, [full, "folder", "folder"]) == "folder"
    assert "a worker has ended, the others go on: node3: No space left on device" in caplog.text
    with pytest.raises(UserError, match="node3: No space left"):
        ray_runner._first_result(ray, [full, UserError("another")])
    with pytest.raises(UnfitWorker):
        ray_runner._first_result(ray, [UnfitWorker("other versions"), "folder"])
    with pytest.raises(StandIn.exceptions.RayError):
        ray_runner._first_result(ray, [StandIn.exceptions.RayError("the cluster has gone")])


def test_a_machine_without_enough_for_a_worker_is_refused_by_the_key():
    needs = {"num_cpus": 4, "num_gpus": 1}
    for resources, key in (({"CPU": 2, "GPU": 1}, "cpus"), ({"CPU": 4}, "gpus")):
        with pytest.raises(UserError, match=rf"ray\.{key}_per_worker=\d, but this machine has \d"):
            ray_runner._check_size(StandIn(resources), Generation(runner="ray"), needs)
        ray_runner._check_size(StandIn(resources), Generation(runner="ray", ray_address="auto"), needs)  # it may grow


def test_an_address_where_nobody_listens_is_refused_at_once(tmp_path):
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"ray\.address={address} cannot be reached \(Connection refused\); start a cluster"):
            on_workers(Generation(runner="ray", ray_address=address), tmp_path, len, {})


def make(folder, *words):
    words = [*WORDS, f"paths.data={folder}", f"paths.outputs={folder.parent / 'outputs'}", *words]
    done = subprocess.run(
        [sys.executable, "-m", "data_gen", *words], check=False, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (cache,) = folder.iterdir()
    assert f"data: {cache}" in done.stdout
    return {path.name: path.read_bytes() for path in cache.iterdir()}


@pytest.mark.full  # half a minute until a cluster works
def test_workers_of_a_cluster_make_the_bytes_of_one_process(tmp_path):
    """Two, and with fewer CPUs than there are workers some that nobody waits for."""
    pytest.importorskip("ray")
    num_workers = 3 if (os.cpu_count() or 1) < 3 else 2
    assert make(tmp_path / "ray", "runner=ray", f"ray.num_workers={num_workers}") == make(tmp_path / "alone")


def test_the_sign_of_a_driver_that_was_killed_long_ago_is_removed(tmp_path):
    recent, old = tmp_path / ".ray-1", tmp_path / ".ray-2"
    for path in (recent, old):
        path.touch()
    two_days_ago = old.stat().st_mtime - 2 * ray_runner.SECONDS_OF_A_SIGN
    os.utime(old, (two_days_ago, two_days_ago))
    sign = ray_runner.new_sign(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([recent, sign])
