"""Trainings that several processes share, interrupted and gone on with."""

import os
import signal

import torch
from commands import SMALL, heads, run, start, wait_for
from safetensors.torch import load_file

from specheads import load_head


def test_two_processes_train_one_head_and_stop_together(tmp_path):
    words = [
        "train.py",
        *SMALL,
        "trainer.devices=2",
        "trainer.accelerator=cpu",
        "loader.batch_size=3",
        "checkpoint.every_steps=2",
    ]
    words += ["trainer.max_epochs=6", "trainer.log_every_n_steps=1"]
    # SIGTERM to all of them, as a scheduler sends it, some steps into the training; then the same command again.
    process = start(tmp_path, *words)
    wait_for(lambda: list(tmp_path.glob("outputs/head/*/checkpoints/last.ckpt")) or process.poll() is not None)
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
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    curves = [next(folder.parents[1].glob("**/metrics.csv")).read_text() for folder in (resumed, whole)]
    assert curves[0] == curves[1]


def test_two_processes_distil_one_draft_and_resume_after_a_kill(tmp_path):
    words = [
        "specheads",
        "distill",
        *SMALL,
        "samples=mixed",
        "refresh_every=3",
        "trainer.max_epochs=2",
        "loader.batch_size=3",
    ]
    words += ["trainer.devices=2", "trainer.accelerator=cpu", "checkpoint.every_steps=2", "trainer.log_every_n_steps=1"]
    words += ["validation={num_prompts: 4, live_prompts: 1, live_tokens: 8}"]
    process = start(tmp_path, *words)
    wait_for(lambda: list(tmp_path.glob("outputs/distill/*/checkpoints/last.ckpt")) or process.poll() is not None)
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
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    curves = [next(folder.parent.glob("**/metrics.csv")).read_text() for folder in (resumed, undisturbed)]
    assert curves[0] == curves[1]
