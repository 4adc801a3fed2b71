"""The first Ctrl-C or SIGTERM ends a run cleanly, the second ends it immediately."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from specheads import interrupts

# Each program prints what it reached; the test sends it signals while it waits for input.
PROGRAMS = {
    "where it is": (
        """
        listen()
        try:
            print("ready", flush=True)
            time.sleep(60)
        except Interrupted as interruption:
            print("ended", interruption, flush=True)
            raise SystemExit(interruption.exit_code)
    """
    ),
    "deferred": (
        """
        listen()
        try:
            with deferred() as request:
                print("ready", flush=True)
                while request.number is None:
                    time.sleep(0.01)
                print("saved", flush=True)
            print("never reached", flush=True)
        except Interrupted as interruption:
            print("ended", interruption, flush=True)
            raise SystemExit(interruption.exit_code)
    """
    ),
    "that does not end": (
        """
        listen()
        with deferred() as request:
            print("ready", flush=True)
            while request.number is None:
                time.sleep(0.01)
            print("saving", flush=True)
            time.sleep(60)
    """
    ),
}


def started(case):
    # Where the tests run in the background, the shell may have them ignore Ctrl-C, and children
    # inherit that.
    code = "import signal, time\nfrom interrupts import SIGNALS, Interrupted, deferred, listen\n"
    code += "for number in SIGNALS:\n    signal.signal(number, signal.SIG_DFL)\n" + textwrap.dedent(
        PROGRAMS[case]
    )
    folder = Path(
        interrupts.__file__
    ).parent  # the module alone starts quickly, the package does not
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
@pytest.mark.parametrize("case", ["where it is", "deferred"])
def test_the_first_signal_ends_a_run_cleanly(case, number, name):
    process = started(case)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert output == ("saved\n" if case == "deferred" else "") + f"ended stopped by {name}\n"


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_a_run_immediately(first, second):
    process = started("that does not end")
    process.send_signal(first)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(second)
    process.communicate(timeout=20)
    assert process.returncode == -second
