"""The notebook for a real pair: every step runs, small and on nano, and the notebook has the
script's cells.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.make_notebook import notebook

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "real_pair.py"


def test_the_notebook_is_the_script():
    made = notebook(SCRIPT.read_text())
    assert json.loads(SCRIPT.with_suffix(".ipynb").read_text()) == made, (
        "run python examples/make_notebook.py"
    )
    assert {cell["cell_type"] for cell in made["cells"]} == {"markdown", "code"}
    for cell in made["cells"]:
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), cell["id"], "exec")


@pytest.mark.full
def test_every_step_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT],
        cwd=tmp_path,
        env=os.environ | {"SPECHEADS_SMALL": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    verbs = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("$ specheads")]
    assert verbs == ["probe", "data", "train", "evaluate", "distill", "train", "evaluate"]
    assert len(list(tmp_path.glob("outputs/evaluate/*/report.json"))) == 2
    assert "next: open" in done.stdout
