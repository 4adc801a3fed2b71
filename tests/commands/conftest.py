import sys

import pytest

from specheads.commands.main import VERB_OF_PARENT, main


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that gives `specheads` a command line and returns its exit code and what it
    printed. `parent` is the verb of the process that starts it.
    """

    def give(*words, parent=""):
        monkeypatch.setenv(VERB_OF_PARENT, parent)
        monkeypatch.setattr(sys, "argv", ["specheads", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return give
