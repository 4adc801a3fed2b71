"""Scripts in processes that have imported everything before they start: forks of a server.

Each has a folder, variables and output of its own. Imports take longer than the small sizes of a test; that a script imports
what it needs is for processes of their own (`commands.run`).
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

import torch
from commands import ROOT, shell

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([f"specheads.commands.{name}" for name in ("train", "evaluate", "data")])


def run(folder, *words, **variables):
    """Run a script of the source tree, or a module, as `commands.run` does."""
    with tempfile.TemporaryDirectory() as kept:
        outputs = [Path(kept) / name for name in ("stdout", "stderr")]
        process = _SERVER.Process(target=_work, args=(words, folder, shell(**variables), outputs))
        process.start()
        process.join()
        return CompletedProcess(words, process.exitcode, *(path.read_text() for path in outputs))


def _work(words, folder, variables, outputs):
    gc.freeze()  # what was imported is not looked at again
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)  # the server may have begun with more, and a variable comes too late
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = list(words)
    try:
        if words[0].endswith(".py"):
            sys.argv[0] = str(ROOT / words[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which a fork of a server leaves out
