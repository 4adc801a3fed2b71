"""A process that has imported the commands, and runs command lines in forks of itself:
`warm_processes` starts and asks it.

It says where the package was found. Then each line of its input is JSON: an object, the arguments
of `work`, is answered by the number of a process; that number is answered by its exit code, as soon
as it has one. It imports nothing of the tests, and so works where only the wheel is installed.
"""

import gc
import json
import os
import runpy
import sys

import torch

import specheads.commands.evaluate
import specheads.commands.train


def main():
    """Answer until the input ends. A fork returns, too, and ends as any process of Python does."""
    torch.set_num_threads(1)
    gc.freeze()  # forks need not look at what was imported
    print(specheads.__file__, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
        elif process := os.fork():
            print(process, flush=True)
        else:
            work(**asked)
            return


def work(words, folder, variables, outputs):
    """Be the process of a command line: a script or a module, and its words."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [
        path
        for path in variables.get("PYTHONPATH", "").split(os.pathsep)
        if path and path not in sys.path
    ]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = words
    if os.path.isfile(words[0]):
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
