"""The peers' processes, and both ends of what they and the script that asks them say.

Needs the standard library alone.

Each line is a JSON object. A worker prints `{"ready": {package: version}}` and then answers
requests for one prompt:

    {"options": {...}, "prompt": [1, 2], "length": 8, "seed": 0}
    -> {"response": [3, 4], "seconds": 0.1}
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

Answer = dict[str, Any]
Generate = Callable[..., Answer]  # it takes the values of a request by their names


class PeerError(RuntimeError):
    """A peer's process failed."""


@dataclass(frozen=True)
class PeerCommand:
    """How a worker is started: the interpreter, the file next to this one, and its setup."""

    python: str
    file: str
    setup: Mapping[str, object]

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command line."""
        path = Path(__file__).with_name(self.file)
        return (self.python, str(path), json.dumps(self.setup))


class Workers:
    """Workers, each started when it is first asked. All others are stopped meanwhile."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self._running: dict[tuple[str, ...], _PeerProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._running.values():
            worker.close()

    def ask(self, command: PeerCommand, request: Mapping[str, object]) -> Answer:
        """Return the answer of a command's worker. Raises PeerError where it failed."""
        if command.words not in self._running:
            worker = _PeerProcess(command.words)
            self._running[command.words] = worker
            self.versions |= worker.versions
        return self._running[command.words].ask(request)


class _PeerProcess:
    """A running worker.

    It is stopped (SIGSTOP) whenever it is not asked, so that no waiting thread of its costs time.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as this object
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,
        )
        self.versions: dict[str, str] = self._answer()["ready"]

    def ask(self, request: Mapping[str, object]) -> Answer:
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process and those that it started."""
        for sent in (signal.SIGCONT, signal.SIGTERM):
            self._signal(sent)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> Answer:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()  # until all of its messages are in the log
            self._log.seek(0)
            raise PeerError(f"the process ended\n{self._log.read()[-3000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        self._signal(signal.SIGSTOP)
        with suppress(ChildProcessError):
            # Until it stands still: a signal takes effect only later
            os.waitpid(self._process.pid, os.WUNTRACED)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def can_import(python: str, package: str) -> bool:
    """Return whether an interpreter has a package that can be imported."""
    try:
        words = [python, "-c", f"import {package}"]
        return subprocess.run(words, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def serve(make: Callable[[Mapping[str, object]], tuple[Mapping[str, str], Generate]]) -> None:
    """Be a worker: answer requests until standard input ends.

    What libraries print goes to standard error.

    `make` gets the setup of the command, and returns the versions of the packages that do the work
    and what answers requests.
    """
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)
        versions, generate = make(json.loads(sys.argv[1]))
        print(json.dumps({"ready": versions}), file=channel, flush=True)
        for line in sys.stdin:
            try:
                answer = generate(**json.loads(line))
            except Exception:  # noqa: BLE001 - whatever the peer raises is answered
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=channel, flush=True)
