"""What several processes agree on, here threads that share a store."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from specheads.commands import agreement as agreement_module
from specheads.commands.agreement import Agreement, Elsewhere, _difference, _left_sign, _missing_sign
from specheads.errors import UserError
from specheads.processes import Processes

HERE = {"key": "k", "count": 2, "packages": {"torch": "2"}, "host": "a"}


def talk(call, count=3):
    """Call with the agreement of each of some processes, all at once; return their results or errors."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))

    def one(rank):
        try:
            return call(Agreement(Processes("torchrun", rank, count, rank, count), store))
        except (OSError, UserError, SystemExit) as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def test_the_first_process_decides_for_all():
    calls = []

    def decide(agreement):
        rank = agreement.processes.rank
        first = agreement.decided(lambda: calls.append(rank) or f"folder of {rank}")
        return first, agreement.decided(lambda: [rank, True, None])

    assert talk(decide) == [("folder of 0", [0, True, None])] * 3
    assert calls == [0]


def test_the_others_end_if_the_first_fails():
    def fail():
        raise OSError("no space")

    first, *others = talk(lambda agreement: agreement.decided(fail))
    assert isinstance(first, OSError)
    assert all(isinstance(each, Elsewhere) and each.code == 2 for each in others)


@pytest.mark.parametrize("problems", [[None] * 3, [None, "b", "c"], ["a", None, "c"], [None, None, "c"]], ids=str)
def test_a_problem_of_any_process_is_one_message_of_all(problems):
    results = talk(lambda agreement: agreement.check(problems[agreement.processes.rank]))
    message = next((problem for problem in problems if problem), None)
    if message is None:
        assert results == [None] * 3
    else:
        assert all(isinstance(each, UserError) and str(each) == message for each in results)


def test_a_process_that_does_not_arrive_is_named(monkeypatch):
    monkeypatch.setattr(agreement_module, "ARRIVAL", timedelta(seconds=0.3))
    first, other, absent = talk(lambda agreement: None if agreement.processes.rank == 2 else agreement.check(None))
    assert str(first) == str(other) and "process 2 has not arrived within 0 minutes" in str(first) and absent is None


def test_a_mistake_that_the_first_process_makes_too_is_said_once(monkeypatch):
    monkeypatch.setattr(agreement_module, "SAME_MISTAKE", timedelta(seconds=1))
    told = threading.Barrier(2)

    def fail(agreement):
        if agreement.processes.is_first:
            agreement.tell_failure("too long")
            return told.wait(10) and None
        told.wait(10)
        return agreement.is_said_by_first("too long"), agreement.is_said_by_first("another")

    assert talk(fail, 2)[1] == (True, False)
    assert talk(lambda agreement: agreement.processes.is_first or agreement.is_said_by_first("alone"), 2) == [True, False]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"host": "b"}, None),
        ({"count": 4}, "is one of 4 processes, and the first process on a one of 2; start all of them at once"),
        ({"packages": {"torch": "3"}}, "has torch 3, and the first process on a torch 2; install the same versions"),
        ({"key": "l"}, "has other settings than the first process on a; give the same command line"),
    ],
)
def test_processes_that_were_started_differently_are_named(changed, message):
    problem = _difference(HERE, HERE | changed)
    assert problem is None if message is None else problem.startswith("process 0 on a") and message in problem


def test_a_folder_that_is_not_shared_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECHEADS_LEASE_SECONDS", "0.2")
    run, data, other = tmp_path / "run", tmp_path / "data", tmp_path / "data of another machine"
    first = HERE | {"sign": _left_sign(run, data)}
    assert _missing_sign(first, run, data) is None
    problem = _missing_sign(first, run, other)
    assert f"does not see what the first process, on a, writes to {other}; give paths.data= a folder that all" in problem
