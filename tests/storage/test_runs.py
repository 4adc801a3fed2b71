"""Which folder a run gets, and how the same command finds it again."""

import json
import subprocess
import sys
import time

import pytest
from omegaconf import OmegaConf

from specheads.commands.command import NoteRunKey, may_resume, run_key
from specheads.errors import UserError
from specheads.storage import runs
from specheads.storage.files import lock


def config(task=(), **changes):
    settings = {
        "seed": 0,
        "resume": True,
        "command": "head",
        "paths": {"outputs": "outputs", "run": "${hydra:runtime.output_dir}"},
    }
    return OmegaConf.create(
        {
            **settings,
            **changes,
            "hydra": {"overrides": {"task": list(task)}, "run": {"dir": "anything"}},
        }
    )


@pytest.fixture(autouse=True)
def no_locks(monkeypatch):
    monkeypatch.setattr(runs, "_locks", {})


@pytest.fixture
def restart():
    """A function that releases the locks of this process, as if a new process began."""

    def forget():
        for held in runs._locks.values():
            held.release()
        runs._locks.clear()

    return forget


def unfinished(parent, name, key="this", finished=False):
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / runs.STATE).write_text(json.dumps({"key": key, "finished": finished}))
    return folder


def test_the_key_of_a_run_depends_on_its_settings_and_not_on_its_folder():
    same = [
        config(),
        config(resume=False),
        config(resume=False, task=["resume=false"]),
        config(task=["verbose=true"]),
    ]
    moved = config()
    moved.hydra.run.dir = "elsewhere"
    assert len({run_key(settings) for settings in [*same, moved]}) == 1
    others = [
        config(seed=1),
        config(command="evaluate"),
        config(task=["head.depth=1,2"]),
        config(task=["head.depth=1,3"]),
    ]
    assert len({run_key(settings) for settings in [config(), *others]}) == 5


def test_the_key_of_a_run_does_not_depend_on_where_it_trains():
    plain = config(trainer={"max_epochs": 3, "devices": 1})
    words = [
        "trainer.devices=2",
        "+trainer.strategy=fsdp2",
        "+trainer.num_nodes=2",
        "trainer.accelerator=cpu",
    ]
    moved = config(
        trainer={
            "max_epochs": 3,
            "devices": 2,
            "strategy": "fsdp2",
            "num_nodes": 2,
            "accelerator": "cpu",
        },
        task=words,
    )
    assert run_key(plain) == run_key(moved) != run_key(config(trainer={"max_epochs": 4}))
    assert run_key(config(trainer=None)) not in (run_key(plain), run_key(config()))


def test_what_a_launcher_restarts_resumes(monkeypatch):
    monkeypatch.setattr(NoteRunKey, "resume", False)
    assert not may_resume()
    for name, value in {
        "TORCHELASTIC_RUN_ID": "a",
        "RANK": "0",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert may_resume()


def test_an_interrupted_run_is_found_again(tmp_path):
    unfinished(tmp_path, "2026-01-01_00-00-00")
    newest = unfinished(tmp_path, "2026-01-02_00-00-00")
    unfinished(tmp_path, "2026-01-04_00-00-00", key="another")
    assert runs.run_folder(tmp_path, "this") == newest


def test_an_interrupted_run_with_a_newer_finished_one_is_left_alone(tmp_path):
    folders = [
        unfinished(tmp_path, "2026-01-01_00-00-00"),
        unfinished(tmp_path, "2026-01-02_00-00-00", finished=True),
    ]
    assert runs.run_folder(tmp_path, "this") not in folders


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_state_that_cannot_be_read_is_no_interrupted_run(tmp_path, content):
    folder = unfinished(tmp_path, "2026-01-01_00-00-00")
    (folder / runs.STATE).write_text(content)
    assert runs.run_folder(tmp_path, "this") != folder


def test_without_resuming_or_without_an_interrupted_run_the_folder_is_new(tmp_path):
    old = unfinished(tmp_path, "2026-01-01_00-00-00")
    for folder in (
        runs.run_folder(tmp_path, "this", resume=False),
        runs.run_folder(tmp_path / "none", "this", resume=False),
    ):
        assert folder != old and not list(folder.glob(runs.STATE))
        time.strptime(folder.name, "%Y-%m-%d_%H-%M-%S")


def test_a_run_knows_whether_it_was_begun_before(tmp_path, restart):
    runs.begin(tmp_path, "this")
    assert not runs.is_resumed(tmp_path)
    restart()
    runs.begin(tmp_path, "this")
    assert runs.is_resumed(tmp_path)
    restart()
    runs.begin(tmp_path, "this", resume=False)
    assert not runs.is_resumed(tmp_path)
    runs.finish(tmp_path)
    restart()
    runs.begin(tmp_path, "this")  # a folder that the user named, and whose run was finished
    assert not runs.is_resumed(tmp_path)


def test_a_sweep_leaves_out_the_jobs_that_it_has_finished(tmp_path, restart):
    first = tmp_path / "0"
    second = tmp_path / "1"
    first.mkdir(), second.mkdir()
    runs.begin(tmp_path, "this")
    assert runs.begin_job(tmp_path, first)
    runs.finish(first)
    assert runs.begin_job(tmp_path, second) and not runs.is_resumed(second)
    restart()
    runs.begin(tmp_path, "this")
    assert not runs.begin_job(tmp_path, first)
    assert runs.begin_job(tmp_path, second) and runs.is_resumed(second)


HOLDER = """
import fcntl, sys
stream = open(sys.argv[1], "a")
fcntl.flock(stream, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that works in an unfinished run's folder."""
    folder = unfinished(tmp_path, "2026-01-01_00-00-00")
    command = [sys.executable, "-c", HOLDER, str(folder / runs.LOCK)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process, folder
    process.kill()
    process.communicate()


def test_a_run_that_is_alive_is_not_resumed_and_its_folder_is_refused(tmp_path, holder, caplog):
    process, folder = holder
    assert runs.run_folder(tmp_path, "this") != folder
    assert f"another process still works in {folder}" in caplog.text
    with pytest.raises(UserError, match=f"another run is working in .*{folder.name}"):
        runs.begin(folder, "this")
    process.kill()
    process.wait()
    runs.begin(folder, "this")
    assert runs.is_resumed(folder)


FORKING = """
import os, sys
from pathlib import Path
from specheads.storage.files import lock
held = lock(Path(sys.argv[1]))
if not (child := os.fork()):
    sys.exit()  # everything is torn down, as where a worker ends
os.waitpid(child, 0)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_fork_that_ends_does_not_release_the_lock_of_its_parent(tmp_path):
    command = [sys.executable, "-c", FORKING, str(tmp_path / runs.LOCK)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        assert lock(tmp_path / runs.LOCK) is None
        process.communicate()
    assert lock(tmp_path / runs.LOCK) is not None
