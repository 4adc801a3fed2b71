"""Command lines in processes that have imported everything before they start: forks of a process
that waits for them.

Each has a folder, variables and output of its own. Imports take longer than the small sizes of a
test; that a script imports what it needs is for processes of their own (`commands.run`).
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from functools import cache
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

from commands import ROOT, shell

FORKING = Path(__file__).with_name("forking.py")


class Server:
    """The process that is forked: of an interpreter, with the variables that are read while it
    imports.

    `package` is the file of the package that it has imported.
    """

    def __init__(self, python=sys.executable, **variables):
        self._variables = variables
        self._process = Popen(
            [python, "-P", FORKING], env=shell(**variables), stdin=PIPE, stdout=PIPE, text=True
        )
        self.package = Path(self._process.stdout.readline().strip())

    def run(self, folder, *words, **variables):
        """Run a script or a module, as `commands.run` does."""
        return self.start(folder, *words, **variables).wait()

    def start(self, folder, *words, **variables):
        """Start a script or a module; return it while it runs."""
        kept = Path(tempfile.mkdtemp())
        outputs = [kept / name for name in ("stdout", "stderr")]
        variables = shell(**self._variables, **variables)
        process = self.ask(
            {
                "words": [str(word) for word in words],
                "folder": folder,
                "outputs": outputs,
                "variables": variables,
            }
        )
        return Started(self, words, process, outputs)

    def ask(self, question):
        """Return the answer of the process, a number; see `forking.py`."""
        self._process.stdin.write(json.dumps(question, default=str) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class Started:
    """A command line that runs, as process `pid`."""

    def __init__(self, server, words, pid, outputs):
        self.pid = pid
        self._server = server
        self._words = words
        self._outputs = outputs

    @property
    def stdout(self):
        """What it has printed so far."""
        return self._outputs[0].read_text() if self._outputs[0].exists() else ""

    def kill(self):
        """Kill it, and wait until it has ended."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self):
        """Return how it ended, as `commands.run` does."""
        code = self._server.ask(self.pid)
        done = CompletedProcess(self._words, code, *(path.read_text() for path in self._outputs))
        shutil.rmtree(self._outputs[0].parent)
        return done


@cache
def server():
    """The server of the source tree in this environment."""
    return Server()


def run(folder, *words, **variables):
    """Run a script of the source tree, or a module, as `commands.run` does."""
    script = [ROOT / words[0]] if words[0].endswith(".py") else [words[0]]
    return server().run(folder, *script, *words[1:], **variables)
