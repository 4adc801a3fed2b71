"""The scripts for a GPU run on a CPU with tiny models, without training libraries, and a script that fails loses no other."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu.machine import DATA_SHEETS, Setup
from benchmarks.gpu.training import Distilling
from benchmarks.render import ROOT
from tests.integrations.test_light_imports import WITHOUT

TABLES = {"round": ["steps", "rounds"], "training": ["distillation", "heads"], "data": ["data"]}
EVERY_SCRIPT = """
from pathlib import Path
from benchmarks.gpu.__main__ import main
for name in sys.argv[2:]:
    assert main([name, "--device", "cpu", "--tiny", "--file", f"{sys.argv[1]}/{name}.json"]) == 0
"""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which every script has written its JSON, run by a process that has torch and transformers only."""
    folder = tmp_path_factory.mktemp("gpu")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT + EVERY_SCRIPT, str(folder), *TABLES]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def written(folder):
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in TABLES}


def test_every_table_and_every_goal_is_measured(folder):
    documents = written(folder)
    assert {name: [table["key"] for table in each["tables"]] for name, each in documents.items()} == TABLES
    goals, *others = runner.tables_of(documents)
    assert [row[:3] for row in goals.rows] == [[*goal] for goal in runner.GOALS.values()]
    assert all(row[-1] > 0 for row in goals.rows)
    assert [table.key for table in others] == [key for keys in TABLES.values() for key in keys]
    steps, rounds = others[:2]
    assert {row[1] for row in steps.rows} == {
        "target alone",
        "verification of 8",
        "verification of 9",
        "draft step",
        "draft step with head",
    }
    assert [row[0] for row in rounds.rows] == ["fixed K=4", "fixed K=8", "head"] and all(row[2] > 1 for row in rounds.rows)


def test_a_script_that_fails_or_takes_too_long_loses_no_other(folder, tmp_path, capsys, monkeypatch):
    def started(name, setup, path):
        if name != "data":
            path.write_text((folder / f"{name}.json").read_text())
        return name == "round"

    monkeypatch.setattr(runner, "OUTPUTS", tmp_path)
    monkeypatch.setattr("benchmarks.results.OUTPUTS", tmp_path)
    monkeypatch.setattr(runner, "started", started)
    assert runner.main(["--device", "cpu", "--tiny"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: training" in out and "FAILED: data" in out and "FAILED: round" not in out
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert [table["key"] for table in kept["tables"]] == ["goals", *TABLES["round"], *TABLES["training"]]
    monkeypatch.undo()
    monkeypatch.setattr(runner, "SECONDS", 0.1)
    assert not runner.started("round", Setup(CPU, True), tmp_path / "late.json")


def test_limits_are_those_of_the_data_sheet(monkeypatch):
    for name, sheet in (("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA H100 80GB HBM3", "H100")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert Setup(torch.device("cuda"), False).limits == DATA_SHEETS[sheet]


def test_operations_of_distillation_are_counted_by_weights():
    """Two per weight and token in the target's forward pass, six in the draft's training."""
    made = Distilling(Setup(CPU, True))
    embedding = 256 * 64
    layers = sum(w.numel() for n, w in made.pair.target.named_parameters() if w.ndim == 2) - 2 * embedding
    num_tokens, num_responses = made.batch.tokens.numel(), len(made.batch.response_tokens)
    assert made.operations(reads_target=True) == 8 * (layers * num_tokens + embedding * num_responses)
    assert made.operations(reads_target=False) == 6 * (layers * num_tokens + embedding * num_responses)
