"""The first Ctrl-C or SIGTERM ends a run cleanly, the second ends it immediately."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specheads import interrupts

# Where the tests run in the background, the shell may have them ignore Ctrl-C, and children inherit
# that.
BEGIN = """
import signal, time
from interrupts import SIGNALS, Interrupted, deferred, listen

for number in SIGNALS:
    signal.signal(number, signal.SIG_DFL)
listen()
"""
# Each program prints what it reached; the test sends it signals while it waits.
WHERE_IT_IS = """
    print("ready", flush=True)
    time.sleep(60)
"""
DEFERRED = """
    with deferred() as request:
        print("ready", flush=True)
        while request.number is None:
            time.sleep(0.01)
        print("saving", flush=True)
        time.sleep({seconds})
    print("never reached", flush=True)
"""


def started(program):
    code = f"{BEGIN}try:{program}except Interrupted as interruption:\n"
    code += "    print('ended', interruption, flush=True)\n"
    code += "    raise SystemExit(interruption.exit_code)\n"
    # The module alone starts quickly, the package does not.
    folder = Path(interrupts.__file__).parent
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
@pytest.mark.parametrize(
    ("program", "said"), [(WHERE_IT_IS, ""), (DEFERRED.format(seconds=0), "saving\n")]
)
def test_the_first_signal_ends_a_run_cleanly(program, said, number, name):
    process = started(program)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert output == f"{said}ended stopped by {name}\n"


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_a_run_immediately(first, second):
    process = started(DEFERRED.format(seconds=60))
    process.send_signal(first)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(second)
    process.communicate(timeout=20)
    assert process.returncode == -second
