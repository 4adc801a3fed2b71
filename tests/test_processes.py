"""Which process of a run this is.

Trainings that several processes share, interrupted and resumed.
"""

import csv
import os
import re
import signal
import socket
from subprocess import Popen

import pytest
import torch
from commands import SMALL, start, wait_for
from safetensors.torch import load_file
from warm_processes import run, server

from specheads import UserError
from specheads.processes import Processes

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_STEP_NUM_NODES": "2",
}
RANKS = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def test_ranks_are_those_of_the_launcher():
    assert Processes.this(TORCHRUN) == Processes("torchrun", 5, 8, 1, 4)
    assert Processes.this(TORCHRUN).num_machines == 2
    assert Processes.this(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}).restarts == 2
    assert Processes.this(SRUN | RANKS | {"SLURM_RESTART_COUNT": "1"}) == Processes(
        "srun", 3, 4, 1, 2, 1
    )


def test_a_command_that_starts_its_processes_itself_is_the_first():
    assert Processes.this({}) == Processes(None, 0, 1, 0, 1)
    one_task = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert Processes.this(one_task).launcher is None
    child = Processes.this({"LOCAL_RANK": "2", "NODE_RANK": "0"})
    assert (child.launcher, child.is_first, child.local_rank) == (None, False, 2)
    assert not Processes.this({"LOCAL_RANK": "0", "NODE_RANK": "1"}).is_first


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "3"},
            "torchrun has started 8 processes, not the same number .* give --nproc-per-node",
        ),
        (TORCHRUN | {"RANK": "first"}, "RANK=first must be a number"),
        (
            SRUN | {"SLURM_NTASKS_PER_NODE": "3"},
            "srun has started 4 processes, not the same number .* give --ntasks-per-node",
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
            "srun has started 4 processes, not the same number .* give --ntasks-per-node",
        ),
    ],
)
def test_variables_that_contradict_each_other_are_refused(variables, message):
    with pytest.raises(UserError, match=message):
        Processes.this(variables)


# --- trainings that several processes share

TRAINED = ["trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "checkpoint.every_steps=2"]
TRAINED += [*SMALL, "calibration=null"]
SIX = ["loader.batch_size=6", "trainer.max_epochs=6"]
TWO = ["trainer.devices=2", "trainer.accelerator=cpu", *SMALL, *SIX, "checkpoint.every_steps=2"]
TWO += ["trainer.log_every_n_steps=1"]
SAME = {"rel": 2e-4, "abs": 2e-5}  # sums of float32 numbers in another order


def interrupted(folder, end, *words):
    """Start a command, end it once there is a checkpoint, and return the exit code and what it
    printed.
    """
    process = start(folder, *words)
    checkpoint = "outputs/*/*/checkpoints/last.ckpt"
    wait_for(lambda: list(folder.glob(checkpoint)) or process.poll() is not None)
    end(process)
    output = process.communicate(timeout=120)[0]
    return process.returncode, output


def ran(folder, *words):
    """Run a command that succeeds and return what it printed."""
    done = run(folder, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# Six imports of everything; two processes train in every run in test_wheel and test_sharding
@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "number", "made"),
    [
        (["train", "heads=lookahead"], signal.SIGTERM, "outputs/head/*/heads/*"),
        (["distill", "validation.num_prompts=4"], signal.SIGKILL, "outputs/distill/*/draft"),
    ],
)
def test_two_processes_train_together_and_resume_together(words, number, made, tmp_path):
    words = ["specheads", *words, *TWO]
    # To all of them, as a scheduler sends it.
    code, output = interrupted(tmp_path, lambda first: os.killpg(first.pid, number), *words)
    if number == signal.SIGTERM:
        assert code == 143, output
        assert "stopped by SIGTERM; the same command resumes it" in output
        assert "Traceback" not in output
    else:
        assert code == -signal.SIGKILL, output
    assert number == signal.SIGKILL or not list(tmp_path.glob(made))
    assert re.search("resumed from|resuming", ran(tmp_path, *words))
    ran(tmp_path, *words, "resume=false")
    folders = sorted(tmp_path.glob(made))
    resumed, whole = (load_file(folder / "model.safetensors") for folder in folders)
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    curves = [path.read_text() for path in sorted(tmp_path.glob("outputs/**/metrics.csv"))]
    assert len(curves) == 2 and curves[0] == curves[1]


def curve(folder):
    """The points of a run's curves."""
    with next(folder.glob("**/metrics.csv")).open() as stream:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(stream)
        ]


@pytest.mark.full
def test_a_run_of_two_processes_is_resumed_by_one(tmp_path):
    """In the folder that the first of them chose, with the curve of one process."""
    words = ["specheads", "train", *TRAINED, *SIX]
    launched = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *words]
    _, output = interrupted(tmp_path, Popen.terminate, *launched)  # torchrun sends it on
    assert output.count("stopped by SIGTERM; the same command resumes it") == 1
    assert output.count("training next_token") == 1
    assert "resumed from" in ran(tmp_path, *words)
    assert len(list(tmp_path.glob("outputs/head/*"))) == 1
    ran(tmp_path, *words, "resume=false")
    points, expected = (curve(each) for each in sorted(tmp_path.glob("outputs/head/*")))
    assert len(points) == len(expected) > 0
    for ours, theirs in zip(points, expected, strict=True):
        assert ours == pytest.approx(theirs, **SAME)


@pytest.mark.full
def test_srun_trains_together_and_data_is_of_one_process(tmp_path):
    """Two plain processes with the variables that srun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    shared |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    shared |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def both(*words):
        started = [
            server().start(
                tmp_path, "specheads", *words, SLURM_PROCID=rank, SLURM_LOCALID=rank, **shared
            )
            for rank in ("0", "1")
        ]
        ended = [process.wait() for process in started]
        codes = [each.returncode for each in ended]
        return codes, "".join(f"{each.stdout}\n{each.stderr}" for each in ended)

    codes, said = both("data", *SMALL)
    assert codes == [2, 2] and "error in process 1 on " in said
    assert "srun has started 2 processes of this command" in said
    codes, said = both("train", *TRAINED, "loader.batch_size=5")
    assert codes == [2, 2]
    assert "error: loader.batch_size=5 rows cannot be split over 2 processes" in said
    sizes = ["trainer.max_epochs=2", "data.num_train=8", "data.max_new_tokens=8"]
    codes, said = both("train", *TRAINED, "loader.batch_size=6", *sizes)
    assert codes == [0, 0], said
    assert len(re.findall(r"^head: ", said, re.MULTILINE)) == 1
    # That of the mistake, and one for both processes.
    assert len(list(tmp_path.glob("outputs/head/*"))) == 2
    assert len(list(tmp_path.glob("data/*/manifest.json"))) == 2  # responses and labels
