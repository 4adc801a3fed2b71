"""Sweeps by Hydra's launchers that start processes: run folders, failures and resumption are those of a sweep in one process.

Skipped where a launcher's plug-in is not installed.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = {"joblib": "hydra_joblib_launcher", "submitit_local": "hydra_submitit_launcher"}
WORDS = ["model=nano", "data.num_train=4", "data.num_dev=2", "data.num_test=2", "generation.rows_per_shard=2"]


@pytest.fixture(params=PLUGINS)
def words(request, tmp_path):
    """The command line of a sweep of two jobs, whose varied key is to be added."""
    pytest.importorskip(f"hydra_plugins.{PLUGINS[request.param]}")
    folders = [f"paths.data={tmp_path}/data", f"paths.outputs={tmp_path}/outputs"]
    more = ["hydra.launcher.n_jobs=2"] if request.param == "joblib" else []
    return ["-m", "data_gen", "-m", f"hydra/launcher={request.param}", *more, *WORDS, *folders]


def start(words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # with processes that a signal of the terminal reaches
    )


def run(words):
    process = start(words)
    out, error = process.communicate(timeout=300)
    return process.returncode, out, error


def states(folder):
    return {path.parent.name: json.loads(path.read_text())["finished"] for path in folder.rglob("run.json")}


def test_the_jobs_of_a_sweep_share_a_data_set(words, tmp_path):
    code, _, error = run([*words, "data.max_new_tokens=4", "ray.num_workers=1,2"])  # which decides nothing here
    assert code == 0, error
    (cache,) = (tmp_path / "data").iterdir()
    assert json.loads((cache / "manifest.json").read_text())["complete"] and not list(cache.glob("*.tmp"))
    (folder,) = (tmp_path / "outputs" / "data_gen").iterdir()
    assert states(folder) == {folder.name: True, "0": True, "1": True}
    configs = [(folder / number / ".hydra" / "overrides.yaml").read_text() for number in ("0", "1")]
    assert "ray.num_workers=1" in configs[0] and "ray.num_workers=2" in configs[1]


def test_a_job_that_fails_is_one_message_and_the_same_command_repeats_it_alone(words, tmp_path):
    words = [*words, "data.max_new_tokens=4,-1"]
    for _ in range(2):
        code, _, error = run(words)
        assert code == 2 and "error: data.max_new_tokens=-1 must be a positive integer" in error and "Traceback" not in error
        (folder,) = (tmp_path / "outputs" / "data_gen").iterdir()
        assert states(folder) == {folder.name: False, "0": True, "1": False}
    logs = [*folder.rglob("*.log"), *folder.rglob(".submitit/*/*_log.*")]
    assert any("already done" in path.read_text() for path in logs)


def test_ctrl_c_ends_all_jobs_and_the_same_command_resumes(words, tmp_path):
    words = [*words, "data.max_new_tokens=60", "data.num_train=400", "seed=0,1"]
    process = start(words)
    while not list((tmp_path / "data").glob("*/train-*.parquet")):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT and "the same command resumes it" in error
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    (folder,) = (tmp_path / "outputs" / "data_gen").iterdir()
    assert not any(states(folder).values())
