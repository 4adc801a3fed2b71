"""Start the peers' processes and ask them one at a time; all others stand still meanwhile."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

FOLDER = Path(__file__).parent


class PeerError(RuntimeError):
    """A peer's process failed."""


@dataclass(frozen=True)
class Command:
    """How a worker is started: the interpreter, the file in FOLDER, and what it is told."""

    python: str
    file: str
    setup: Mapping[str, Any]


class _Worker:
    """A running worker. It is stopped (SIGSTOP) whenever it is not asked, so that no waiting thread of its costs time."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as this object
        self._process = subprocess.Popen(
            [command.python, str(FOLDER / command.file), json.dumps(command.setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,
        )
        self.versions: dict[str, str] = self._answer()["ready"]

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. Raises PeerError where the worker failed."""
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> list[str]:
        """End the process and those that it started; return what it said about models that could not be compiled."""
        for sent in (signal.SIGCONT, signal.SIGTERM):
            self._signal(sent)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.seek(0)
        return [line for line in self._log.read().splitlines() if "runs uncompiled" in line]

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()  # until all of its messages are in the log
            self._log.seek(0)
        answer = json.loads(line) if line else {"error": "the process ended\n" + self._log.read()[-3000:]}
        if "error" in answer:
            raise PeerError(f"{self.command.file} failed: {answer['error']}")
        self._stop()
        return answer

    def _stop(self) -> None:
        """Stop the process, and wait until it stands still: a signal takes effect only later."""
        self._signal(signal.SIGSTOP)
        with suppress(ChildProcessError):
            os.waitpid(self._process.pid, os.WUNTRACED)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Workers:
    """The workers of some commands, each started when it is first asked."""

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self.commands = commands
        self.versions: dict[str, str] = {}
        self.warnings: list[str] = []  # of the workers that are closed
        self._running: dict[str, _Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(())

    def ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the worker `name`."""
        if name not in self._running:
            self._running[name] = _Worker(self.commands[name])
            self.versions |= self._running[name].versions
        return self._running[name].ask(request)

    def keep(self, names: Sequence[str]) -> None:
        """Close all workers but these."""
        for name in [name for name in self._running if name not in names]:
            self.warnings += self._running.pop(name).close()


def can_import(python: str, package: str) -> bool:
    """Return whether an interpreter has a package that can be imported."""
    try:
        return subprocess.run([python, "-c", f"import {package}"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False
