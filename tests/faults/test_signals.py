"""Ctrl-C and SIGTERM at any moment of the imports of every command: no traceback, and the exit
codes of the shell.
"""

import random
import signal
import subprocess
import sys

import pytest
from commands import ROOT, shell

from specheads.commands.verbs import VERBS

COMMANDS = {verb: [str(ROOT / "specheads" / "__main__.py"), *verb.split()] for verb in VERBS}
COMMANDS |= {
    path: [str(ROOT / path)] for path in ("train.py", "evaluate.py", "data_gen/__main__.py")
}
IN_EVERY_RUN = ("train", "runs", "evaluate.py")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.full)
        for name in COMMANDS
    ],
)
def test_a_signal_during_imports_ends_a_command_without_a_traceback(name, tmp_path):
    rng = random.Random(name)
    words = COMMANDS[name]
    number = rng.choice([signal.SIGINT, signal.SIGTERM])
    # Where the tests run in the background, the shell may have them ignore Ctrl-C, and children
    # inherit that.
    script = (
        "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        f" sys.argv = {words!r}; "
    )
    script += f"runpy.run_path({words[0]!r}, run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", script],
        cwd=tmp_path,
        env=shell(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:  # every import says when it is done
        if "specheads.interrupts" in line:
            break
    for _ in range(rng.randrange(1, 80 if name == "runs" else 400)):  # `runs` imports little
        process.stderr.readline()
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    lines = [line for line in said.splitlines() if not line.startswith("import time:")]
    assert process.returncode == 128 + number, lines
    assert lines == [f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}"]
