import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import wait_for

from specheads.data_gen import ray_runner
from specheads.data_gen.ray_runner import _Crew, _packages_here, _Worker, on_workers
from specheads.data_gen.settings import DataGeneration
from specheads.errors import UserError
from specheads.storage.files import lock

ROOT = Path(__file__).parents[2]
WORDS = [
    "model=nano",
    "data.num_train=6",
    "data.num_dev=2",
    "data.num_test=2",
    "data.max_new_tokens=8",
]
WORDS += ["generation.rows_per_shard=2", "generation.batch_size=2"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def check(folder, **changes):
    sign = folder / ".ray-0"
    sign.touch()
    return {
        "sign": str(sign),
        "packages": _packages_here(),
        "host": "driver",
        "folder": str(folder),
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"packages": _packages_here() | {"torch": "1.0"}},
            r"the worker on \S+ has .*'torch'.*, driver has .*'torch': '1\.0'.*; install",
        ),
        (
            {"sign": "/no/such/folder/.ray-0"},
            "does not see /no/such/folder of driver; give a folder that all machines share",
        ),
    ],
)
def test_a_worker_that_cannot_take_part_says_why(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        _Worker(lambda argument: pytest.fail("it works"), {}, check(tmp_path, **changes)).begin()


def test_a_mistake_of_a_worker_names_its_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fail(argument):
        raise UserError("data.num_train=-1 is wrong")

    with pytest.raises(UserError, match=f"{socket.gethostname()}: data.num_train=-1 is wrong"):
        _Worker(fail, {}, check(tmp_path)).begin()
    # It is done
    worker = _Worker(lambda argument: argument["folder"], {"folder": tmp_path}, check(tmp_path))
    worker.begin()
    assert worker.folder() == str(tmp_path) and worker.missing() == ("", 0, [])


class StandIn:
    """As much of Ray as a crew meets: a call is done when it is waited for, in the order of the
    calls.
    """

    class exceptions:
        class RayActorError(Exception):
            pass

        class RayTaskError(Exception):
            def __init__(self, cause):
                self.cause = cause

    def wait(self, calls):
        return calls[:1], calls[1:]

    def get(self, call):
        result = call()
        if isinstance(result, self.exceptions.RayActorError):
            raise result
        if isinstance(result, Exception):
            raise self.exceptions.RayTaskError(result)
        return result

    def kill(self, worker):
        pass


def crew(folder, count, *fates, lots=4):
    """Return a crew whose workers meet what `fates` says, (when it begins, at its first lot), and
    the lots that are made.
    """
    made = []
    left = iter(fates)

    def new_worker():
        at_begin, at_make = next(left, (None, None))
        answers = {
            "begin": lambda: at_begin,
            "folder": lambda: str(folder),
            "missing": lambda: ("labels", lots, [[f"{number}"] for number in range(lots)]),
            "make": lambda lot: at_make or made.append(lot) or 1,
            "complete": lambda: made.append("complete"),
        }
        return SimpleNamespace(
            **{
                name: SimpleNamespace(remote=lambda *given, answer=answer: lambda: answer(*given))
                for name, answer in answers.items()
            }
        )

    return _Crew(StandIn(), new_worker, count), made


def test_lots_of_workers_that_die_are_made_by_others(tmp_path, caplog):
    died = StandIn.exceptions.RayActorError()
    workers, made = crew(tmp_path, 3, (None, None), (None, died), (died, None))
    with caplog.at_level(logging.WARNING):
        assert workers.make_stage() == str(tmp_path)
    assert made[-1] == "complete" and sorted(made[:-1]) == [["0"], ["1"], ["2"], ["3"]]
    assert caplog.text.count("a worker has died, and another one begins") == 2
    assert lock(tmp_path / ".lock") is not None  # it is released


def test_a_mistake_of_a_worker_ends_the_run_and_so_do_workers_that_always_die(tmp_path):
    full = UserError("node3: No space left on device")
    for fates in ([(None, full)], [(full, None)]):
        with pytest.raises(UserError, match="node3: No space left"):
            crew(tmp_path, 2, *fates)[0].make_stage()
    with pytest.raises(StandIn.exceptions.RayActorError):
        crew(tmp_path, 1, *[(StandIn.exceptions.RayActorError(), None)] * 99)[0].make_stage()


def test_a_machine_without_enough_for_a_worker_is_refused_by_the_key():
    needs = {"ray_cpus_per_worker": 4, "ray_gpus_per_worker": 1}
    for resources, key in (({"CPU": 2, "GPU": 1}, "cpus"), ({"CPU": 4}, "gpus")):
        with pytest.raises(UserError, match=rf"ray\.{key}_per_worker=\d, but this machine has \d"):
            ray_runner._check_size(resources, DataGeneration(runner="ray", **needs))
        # It may grow
        ray_runner._check_size(resources, DataGeneration(runner="ray", ray_address="auto", **needs))


def test_an_address_where_nobody_listens_is_refused_at_once(tmp_path):
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(
            UserError,
            match=(
                rf"ray\.address={address} cannot be reached \(Connection refused\); start a cluster"
            ),
        ):
            on_workers(DataGeneration(runner="ray", ray_address=address), tmp_path, len, [{}])


def content(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def words_of(folder, *words):
    words = [*WORDS, f"paths.data={folder}", f"paths.outputs={folder.parent / 'outputs'}", *words]
    return [sys.executable, "-m", "data_gen", *words]


def make(folder, *words):
    done = subprocess.run(
        words_of(folder, *words),
        check=False,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"data: {folder}" in done.stdout
    return content(folder)


@pytest.fixture
def drive(tmp_path):
    """Return a function that starts a command with two workers, which ends with the test at the
    latest.
    """
    started = []

    def start():
        words = words_of(tmp_path / "ray", "runner=ray", "ray.num_workers=2")
        started.append(subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.full  # half a minute until a cluster works
def test_workers_of_a_cluster_make_the_bytes_of_one_process_after_kills_too(tmp_path, drive):
    """Of the driver, once a shard is there, and of a worker of the next one."""
    pytest.importorskip("ray")
    alone = make(tmp_path / "alone")
    first = drive()
    wait_for(lambda: list((tmp_path / "ray").glob("*/*.parquet")) or first.poll() is not None, 600)
    first.kill()
    first.wait()
    second = drive()
    wait_for(lambda: workers_of(second.pid) or second.poll() is not None, 600)
    os.kill(workers_of(second.pid)[0], signal.SIGKILL)
    assert second.wait(600) == 0
    for left in (tmp_path / "ray").glob(".ray-*"):  # of the driver that was killed
        left.unlink()
    assert content(tmp_path / "ray") == alone


def workers_of(driver):
    """The numbers of the processes of Ray below a driver that work for it."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], check=True, capture_output=True, text=True
    ).stdout
    known = {driver}
    found = []
    for line in sorted(listed.splitlines(), key=lambda line: int(line.split()[0])):  # parents first
        process, parent, title = line.split(maxsplit=2)
        if int(parent) in known:
            known.add(int(process))
            found += [int(process)] if title.startswith("ray::_Worker.") else []
    return found
