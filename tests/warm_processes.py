"""Command lines in processes that have imported everything before they start: forks of a process that waits for them.

Each has a folder, variables and output of its own. Imports take longer than the small sizes of a test; that a script imports
what it needs is for processes of their own (`commands.run`).
"""

import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

from commands import ROOT, shell

FORKING = Path(__file__).with_name("forking.py")


class Server:
    """The process that is forked: of an interpreter, with the variables that are read while it imports.

    `package` is the file of the package that it has imported.
    """

    def __init__(self, python=sys.executable, **variables):
        self._variables = variables
        self._process = Popen([python, "-P", FORKING], env=shell(**variables), stdin=PIPE, stdout=PIPE, text=True)
        self.package = Path(self._process.stdout.readline().strip())

    def run(self, folder, *words, **variables):
        """Run a script or a module, as `commands.run` does."""
        with tempfile.TemporaryDirectory() as kept:
            outputs = [Path(kept) / name for name in ("stdout", "stderr")]
            asked = {"words": words, "folder": folder, "outputs": outputs, "variables": shell(**self._variables, **variables)}
            self._process.stdin.write(json.dumps(asked, default=str) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            return CompletedProcess(words, code, *(path.read_text() for path in outputs))


@cache
def server():
    """The server of the source tree in this environment."""
    return Server()


def run(folder, *words, **variables):
    """Run a script of the source tree, or a module, as `commands.run` does."""
    script = [ROOT / words[0]] if words[0].endswith(".py") else [words[0]]
    return server().run(folder, *script, *words[1:], **variables)
