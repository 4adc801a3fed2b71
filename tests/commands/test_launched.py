"""What a process says, and keeps to itself, because a launcher has started several."""

import logging
from types import SimpleNamespace

import pytest

from specheads.commands import launched
from specheads.commands.launched import prepare_process, silent_others, tell


@pytest.fixture(params=["0", "1"])
def rank(request, monkeypatch):
    """This process as one of two, without the others."""
    variables = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": request.param}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return request.param


def test_the_first_process_prints(rank, capsys):
    with silent_others():
        print("hello")
    print("later")
    assert capsys.readouterr().out == ("hello\nlater\n" if rank == "0" else "later\n")


def test_a_mistake_in_the_command_line_is_said_once(rank, capsys):
    tell("too long")
    assert capsys.readouterr().err == ("error: too long\n" if rank == "0" else "")


@pytest.mark.parametrize("same", [True, False])
def test_a_later_mistake_is_said_by_the_first_process_or_by_the_only_one_that_makes_it(rank, same, capsys, monkeypatch):
    told = []
    talk = SimpleNamespace(tell_failure=told.append, is_said_by_first=lambda message: same)
    monkeypatch.setattr(launched, "has_begun", lambda: True)
    monkeypatch.setattr(launched, "begun", lambda: talk)
    tell("no space")
    printed = capsys.readouterr().err
    if rank == "0":
        assert printed == "error: no space\n" and told == ["no space"]
    else:
        assert not told and (printed == "") == same and (same or printed.startswith("error in process 1 on "))


def test_variables_that_contradict_each_other_are_told_by_each(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("RANK", "first")
    tell("RANK=first must be a number")
    assert "RANK=first" in capsys.readouterr().err


def test_only_the_first_process_writes_the_log(rank, tmp_path):
    root, handler = logging.getLogger(), logging.FileHandler(tmp_path / "train.log")
    root.addHandler(handler)
    try:
        prepare_process()
        assert (handler in root.handlers) == (rank == "0")
    finally:
        root.removeHandler(handler)
        handler.close()
