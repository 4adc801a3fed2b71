"""The three commands, end to end on nano with small sizes, and what they say to a user's mistakes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specheads import load_head

ROOT = Path(__file__).parents[1]
SMALL = ["data.num_train=24", "data.num_dev=6", "data.num_test=6", "data.max_new_tokens=24"]


def run(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script = [str(ROOT / words[0])] if words[0].endswith(".py") else ["-m", words[0]]
    return subprocess.run(
        [sys.executable, *script, *words[1:]], check=False, cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which data was generated and a head trained."""
    folder = tmp_path_factory.mktemp("run")
    done = run(folder, "train.py", *SMALL, "trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    return folder


def heads(folder):
    return sorted(path.parent for path in folder.glob("outputs/head/**/heads/*/config.json"))


def test_train_leaves_a_head_its_logs_and_the_next_command(folder):
    (exported,) = heads(folder)
    head = load_head(exported)
    assert head.config.judges == "next_token" and head.config.train["num_prompts"] == 24
    assert {"model.safetensors", "golden.safetensors", "README.md", "config.json"} <= {p.name for p in exported.iterdir()}
    run_folder = exported.parents[1]
    header = (run_folder / "csv" / "metrics.csv").read_text().splitlines()[0]
    for metric in ("kl", "auroc", "brier", "ece", "loss"):
        assert f"dev/next_token-d3-r1/{metric}" in header
    assert list(run_folder.glob("wandb/offline-run-*"))
    assert (run_folder / "checkpoints" / "last.ckpt").is_file()
    assert "draft probability" in json.loads((run_folder / "test.json").read_text())
    assert (run_folder / ".hydra" / "config.yaml").is_file()


def test_a_second_command_uses_the_same_data(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.glob("data/*/*")}
    assert any(path.suffix == ".parquet" for path in before)
    done = run(folder, "data_gen", *SMALL)
    assert done.returncode == 0 and "complete" in done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.glob("data/*/*")} == before


def test_a_sweep_trains_every_combination(folder):
    sweep = ["-m", "head.depth=0,1", "head.judges=input_token,next_token", "experiment=specdecpp", "trainer.max_epochs=1"]
    before = len(heads(folder))
    done = run(folder, "train.py", *sweep, *SMALL)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in heads(folder)} - {"next_token-d3-r1"}
    assert names == {f"{judges}-d{depth}-r6" for judges in ("input_token", "next_token") for depth in (0, 1)}
    assert len(heads(folder)) == before + 4
    (sweep_folder,) = {path.parents[2] for path in heads(folder)} - {folder / "outputs" / "head"} - {heads(folder)[0].parents[2]}
    assert len(list(sweep_folder.glob("*/wandb/offline-run-*"))) == 4  # a W&B run for each job


def test_evaluate_reports_the_latest_head(folder):
    done = run(folder, "evaluate.py", *SMALL, "num_prompts=4", "fixed_lengths=[2,4]", "thresholds=[0.3,0.7]")
    assert done.returncode == 0, done.stderr
    (report,) = folder.glob("outputs/evaluate/*/report.json")
    content = json.loads(report.read_text())
    assert [row["name"] for row in content["rows"]] == ["target alone", "fixed K=2", "fixed K=4", "head 0.3", "head 0.7"]
    assert "ratio 10" in done.stdout and str(report.parent.name) in done.stdout
    assert {"report.csv", "pareto.png", "speed.png"} <= {path.name for path in report.parent.iterdir()}


MISTAKES = {
    "unknown model": (["train.py", "model=nanoo"], "nanoo.*nano"),
    "unknown data": (["data_gen", "data=nothing"], "nothing.*alpaca"),
    "unknown key": (["train.py", "head.dept=2"], "head.dept"),
    "head folder that is not there": (
        ["evaluate.py", "head=outputs/none"],
        "no head folder 'outputs/none'|'outputs/none' is no local folder",
    ),
    "no head trained yet": (["evaluate.py"], "train one with python train.py"),
    "threshold above one": (["evaluate.py", "head=HEAD", "thresholds=[1.2]"], r"threshold=1.2 is outside \[0, 1\]"),
    "data that is not there": (["data_gen", "data=alpaca", "data.path=none.jsonl"], "none.jsonl.*could not be loaded"),
    "models that are not there": (["train.py", "model.target=/none", "model.tokenizer=null"], "'/none' could not be loaded"),
    "unknown kind of head": (["train.py", "head.judges=both"], "'both'.*input_token, next_token"),
    "negative depth": (["train.py", "head.depth=-1"], "head.depth=-1"),
    "temperature below zero": (["data_gen", "warp.temperature=-1"], "temperature=-1"),
    "no prompts": (["data_gen", "data.num_train=0", "data.num_dev=0", "data.num_test=0"], "none of 0 prompts"),
    "wrong type": (["train.py", "trainer.max_epochs=many"], "trainer.max_epochs=many"),
    "no dev prompts": (["train.py", "data.num_dev=0"], "data.num_dev=0"),
    "checkpoint that is not there": (["train.py", "resume=none.ckpt"], "resume=none.ckpt"),
    "unknown dtype": (["data_gen", "model.dtype=bfloat61"], "dtype='bfloat61'"),
    "device that is not there": (["data_gen", "model.device=gpu9"], "device='gpu9'"),
    "pair without a draft": (["train.py", "model=mine", "model.target=x"], "model.draft"),
    "one threshold in place of a list": (["evaluate.py", "thresholds=0.5"], "thresholds=0.5 is not a list"),
    "mixing that leaves nothing": (["train.py", "head.judges=input_token", "mixing.response_share=1"], "response_share=1"),
    "unknown label": (["train.py", "head.label=soft"], "head.label='soft'"),
    "unknown engine": (["evaluate.py", "head=null", "engine=warp"], "engine='warp'"),
}


@pytest.mark.parametrize("words, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gets_one_message_and_exit_code_two(words, message, tmp_path, request):
    if any("HEAD" in word for word in words):
        words = [word.replace("HEAD", str(heads(request.getfixturevalue("folder"))[0])) for word in words]
    done = run(tmp_path, *words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(message, done.stderr, re.DOTALL), done.stderr
