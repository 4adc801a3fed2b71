"""Which process of a run this is.

Trainings that several processes share, interrupted and resumed.
"""

import csv
import os
import re
import signal
import socket

import pytest
import torch
from commands import SMALL, heads, start, wait_for
from safetensors.torch import load_file
from warm_processes import run, server

from specheads import UserError, load_head
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
    assert (
        Processes.this(
            {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
        ).launcher
        is None
    )
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


# Six imports of everything; two processes train in every run in test_wheel and test_sharding
@pytest.mark.full
def test_two_processes_train_one_head_and_stop_together(tmp_path):
    words = [
        "train.py",
        *SMALL,
        "heads=lookahead",
        "trainer.devices=2",
        "trainer.accelerator=cpu",
        "loader.batch_size=6",
        "checkpoint.every_steps=2",
    ]
    words += ["trainer.max_epochs=6", "trainer.log_every_n_steps=1"]
    # SIGTERM to all of them, as a scheduler sends it, some steps into the training; then the same
    # command again.
    process = start(tmp_path, *words)
    wait_for(
        lambda: (
            list(tmp_path.glob("outputs/head/*/checkpoints/last.ckpt"))
            or process.poll() is not None
        )
    )
    os.killpg(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 143, output
    assert "stopped by SIGTERM; the same command resumes it" in output and "Traceback" not in output
    assert not heads(tmp_path)
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout + done.stderr
    undisturbed = run(tmp_path, *words, "resume=false")
    assert undisturbed.returncode == 0, undisturbed.stderr
    resumed, whole = sorted(heads(tmp_path))
    assert load_head(whole).config.train["num_prompts"] == 24
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (resumed, whole))
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    curves = [
        next(folder.parents[1].glob("**/metrics.csv")).read_text() for folder in (resumed, whole)
    ]
    assert curves[0] == curves[1]


@pytest.mark.full
def test_two_processes_distil_one_draft_and_resume_after_a_kill(tmp_path):
    words = ["specheads", "distill", *SMALL, "trainer.max_epochs=2", "loader.batch_size=6"]
    words += [
        "trainer.devices=2",
        "trainer.accelerator=cpu",
        "checkpoint.every_steps=2",
        "trainer.log_every_n_steps=1",
    ]
    words += ["validation.num_prompts=4"]
    process = start(tmp_path, *words)
    wait_for(
        lambda: (
            list(tmp_path.glob("outputs/distill/*/checkpoints/last.ckpt"))
            or process.poll() is not None
        )
    )
    os.killpg(process.pid, signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == -signal.SIGKILL, output
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stdout + done.stderr
    whole = run(tmp_path, *words, "resume=false")
    assert whole.returncode == 0, whole.stderr
    resumed, undisturbed = sorted(tmp_path.glob("outputs/distill/*/draft"))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (resumed, undisturbed))
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    curves = [
        next(folder.parent.glob("**/metrics.csv")).read_text() for folder in (resumed, undisturbed)
    ]
    assert curves[0] == curves[1]


# --- processes that a launcher starts

TRAINED = [
    *SMALL,
    "trainer.accelerator=cpu",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
    "checkpoint.every_steps=2",
]
TRAINED += ["loader.batch_size=5", "calibration=null"]
SAME = {"rel": 2e-4, "abs": 2e-5}  # sums of float32 numbers in another order


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
    words = ["specheads", "train", *TRAINED, "loader.batch_size=6", "trainer.max_epochs=6"]
    process = start(
        tmp_path, "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *words
    )
    wait_for(
        lambda: (
            list(tmp_path.glob("outputs/head/*/checkpoints/last.ckpt"))
            or process.poll() is not None
        )
    )
    process.terminate()  # torchrun sends it on
    output = process.communicate(timeout=120)[0]
    assert (
        output.count("stopped by SIGTERM; the same command resumes it")
        == output.count("training next_token")
        == 1
    )
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout + done.stderr
    assert len(list(tmp_path.glob("outputs/head/*"))) == 1
    whole = run(tmp_path, *words, "resume=false")
    assert whole.returncode == 0, whole.stderr
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

    def both(*words):
        started = []
        for rank in ("0", "1"):
            ranks = {
                "SLURM_PROCID": rank,
                "SLURM_LOCALID": rank,
                "SLURM_NODEID": "0",
                "SLURM_NTASKS": "2",
                "SLURM_JOB_ID": "7",
            }
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            here = {
                "SLURM_NTASKS_PER_NODE": "2",
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_NNODES": "1",
            }
            started.append(
                server().start(
                    tmp_path, "specheads", *words, SLURM_STEP_ID="0", **ranks, **here, **address
                )
            )
        ended = [process.wait() for process in started]
        return (
            [each.returncode for each in ended],
            "".join(each.stdout for each in ended),
            "".join(each.stderr for each in ended),
        )

    codes, _, errors = both("data", *SMALL)
    assert (
        codes == [2, 2]
        and "error in process 1 on " in errors
        and "srun has started 2 processes of this command" in errors
    )
    codes, _, errors = both("train", *TRAINED)
    assert (
        codes == [2, 2]
        and "error: loader.batch_size=5 rows cannot be split over 2 processes" in errors
    )
    codes, printed, errors = both(
        "train", *TRAINED, "loader.batch_size=6", "data.num_train=8", "data.max_new_tokens=8"
    )
    assert codes == [0, 0], errors
    assert len(re.findall(r"^head: ", printed, re.MULTILINE)) == 1
    # That of the mistake, and one for both processes.
    assert len(list(tmp_path.glob("outputs/head/*"))) == 2
    assert len(list(tmp_path.glob("data/*/manifest.json"))) == 2  # responses and labels
