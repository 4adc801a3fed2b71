"""The entry points as users run them: processes in a folder, with sizes that take seconds."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = [
    "model=nano",
    "data.num_train=24",
    "data.num_dev=6",
    "data.num_test=6",
    "data.max_new_tokens=16",
]


def shell(**variables):
    """The environment of a user's shell: without the W&B service of this process, in which the runs
    killed here would live on.
    """
    ours = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return {
        **ours,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def command(words):
    """The command line of a script of the source tree, or of a module."""
    script = [str(ROOT / words[0])] if words[0].endswith(".py") else ["-m", words[0]]
    return [sys.executable, *script, *words[1:]]


def run(folder, *words, **variables):
    return subprocess.run(
        command(words),
        check=False,
        cwd=folder,
        env=shell(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def start(folder, *words):
    """Start a script or a module in a process group of its own.

    Return the process, whose output is one text.
    """
    return subprocess.Popen(
        command(words),
        cwd=folder,
        env=shell(),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def heads(folder):
    return sorted(path.parent for path in folder.glob("outputs/head/**/heads/*/config.json"))


def wait_for(condition, seconds=180):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)
