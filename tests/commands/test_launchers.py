"""Sweeps by Hydra's launchers that start processes: run folders, failures and resumption are those of a sweep in one process.

Skipped where a launcher's plug-in is not installed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specheads.storage.files import lock

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.full  # every sweep imports everything five times
PLUGINS = {"joblib": "hydra_joblib_launcher", "submitit_local": "hydra_submitit_launcher"}


@pytest.fixture(params=["joblib", "submitit_local"])
def words(request, tmp_path):
    """The command line of a sweep of two jobs at a time, whose seeds are to be added."""
    pytest.importorskip(f"hydra_plugins.{PLUGINS[request.param]}")
    more = ["hydra.launcher.n_jobs=2"] if request.param == "joblib" else []
    return ["-m", f"hydra/launcher={request.param}", *more, "model=nano", f"paths.outputs={tmp_path}"]


# Where the tests run in the background, the shell may have them ignore Ctrl-C, and children inherit that.
HEARS_CTRL_C = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
HEARS_CTRL_C += "runpy.run_module('sweep_jobs', run_name='__main__', alter_sys=True)"


def start(words):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", HEARS_CTRL_C, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # whose processes a signal of the terminal reaches
    )


def run(words):
    process = start(words)
    out, error = process.communicate(timeout=300)
    return process.returncode, out, error


def states(folder):
    return {path.parent.name: json.loads(path.read_text())["finished"] for path in folder.rglob("run.json")}


def test_jobs_have_folders_of_their_own_and_the_same_command_repeats_those_that_failed(words, tmp_path):
    code, _, error = run([*words, "seed=0,1"])
    assert code == 2 and error.splitlines()[-1] == "error: seed=1 must be another number" and "Traceback" not in error
    (folder,) = (tmp_path / "data_gen").iterdir()
    assert states(folder) == {folder.name: False, "0": True, "1": False}
    configs = [(folder / number / ".hydra" / "overrides.yaml").read_text() for number in ("0", "1")]
    assert "seed=0" in configs[0] and "seed=1" in configs[1]
    processes = {(folder / number / "begun").read_text() for number in ("0", "1")}
    assert not (folder / "begun").exists() and len(processes) == 2
    with lock(folder / "1" / ".lock"):  # by a job that an earlier command has launched
        code, _, error = run([*words, "seed=0,1"])
    assert code == 2 and f"another process still works in {folder}/1, a job that an earlier command has launched" in error
    assert states(folder) == {folder.name: False, "0": True, "1": False}
    assert (folder / "0" / "times").read_text() == "done\n"  # it was not repeated


def test_ctrl_c_ends_all_jobs_and_the_same_command_resumes(words, tmp_path):
    process = start([*words, "seed=2,0"])
    while len(list(tmp_path.glob("data_gen/*/*/begun"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "the same command resumes it" in error  # submitit's own processes print after it, too
    (folder,) = (tmp_path / "data_gen").iterdir()
    waiting = int((folder / "0" / "begun").read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{waiting}/cmdline").exists() and time.monotonic() < deadline:  # submitit's controller waits for it
        time.sleep(0.05)
    assert not Path(f"/proc/{waiting}/cmdline").exists() and not states(folder)["0"]
