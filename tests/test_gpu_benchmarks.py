"""The script for a GPU runs on a CPU with tiny models."""

import json
import os
import subprocess
import sys

from benchmarks.gpu import __main__ as runner
from benchmarks.render import ROOT
from tests.integrations.test_light_imports import WITHOUT

SCRIPT = """
from pathlib import Path
import benchmarks.results
from benchmarks.gpu.__main__ import main
benchmarks.results.OUTPUTS = Path(sys.argv[1])
main(["--device", "cpu", "--tiny"])
"""


def test_every_table_and_every_goal_is_measured_without_training_libraries(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT + SCRIPT, str(tmp_path)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    goals, *others = json.loads((tmp_path / "gpu.json").read_text())["tables"]
    assert [row[:3] for row in goals["rows"]] == [[*goal] for goal in runner.GOALS.values()]
    assert all(row[-1] > 0 for row in goals["rows"])
    assert [table["key"] for table in others] == ["steps", "rounds"]
    steps, rounds = (table["rows"] for table in others)
    names = {
        "target alone",
        "verification of 8",
        "verification of 9",
        "draft step",
        "draft step with head",
    }
    assert {row[1] for row in steps} == names
    assert [row[0] for row in rounds] == ["fixed K=4", "fixed K=8", "head"] and all(
        row[2] > 1 for row in rounds
    )
