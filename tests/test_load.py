"""What other processes leave of a machine, by counters that the tests write."""

import logging
import os
import time

import pytest
import torch

from specheads import load

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of four cores: a function that lets seconds pass in which all processes and this
    one keep cores busy.
    """
    now = [100.0]
    own = [0.0]
    busy = [0.0]
    counters = tmp_path / "stat"

    def passes(seconds, all_cores, own_cores, niced=0.0):
        now[0] += seconds
        own[0] += own_cores * seconds
        busy[0] += all_cores * seconds
        part = round(busy[0] * TICKS / 5)
        idle = round(1000 * now[0])
        # Niced, idle and waiting make room.
        numbers = [part, round(niced * TICKS), part, idle, idle, part, part, part, 0, 0]
        lines = ["cpu  " + " ".join(map(str, numbers))]
        lines += [f"cpu{n} 0 0 0 0 0 0 0 0 0 0" for n in range(4)]
        lines += ["intr 1", f"procs_running {1 + (all_cores > own_cores)}"]
        counters.write_text("\n".join(lines))

    passes(0, 0, 0)
    monkeypatch.setattr(load, "_COUNTERS", counters)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "nice", {0: 0}.__getitem__)
    # Of this process in two modes, of its children, and the clock.
    monkeypatch.setattr(
        os, "times", lambda: (own[0] / 2, own[0] / 2, 9 * own[0], 9 * own[0], now[0])
    )
    return passes


@pytest.fixture
def threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(load, "_threads", load._Threads())
    yield load._threads
    torch.set_num_threads(before)


def test_others_keep_busy_what_this_process_does_not(machine):
    others = load.OthersLoad()
    machine(2, all_cores=3.5, own_cores=2, niced=9)  # niced processes make room
    assert others.cores == 4 and others.next() == pytest.approx(1.5, abs=0.05)
    machine(1, all_cores=1, own_cores=1.2)
    assert others.next() == 0
    machine(1, all_cores=3, own_cores=1)
    # Of two busy cores one is left over.
    assert others.taken(threads=3) == pytest.approx(1, abs=0.05)
    for threads in (4, 9):
        machine(1, all_cores=3, own_cores=1)
        assert others.taken(threads) == pytest.approx(2, abs=0.05)
    machine(1, all_cores=1, own_cores=1)
    assert others.taken(threads=4) == pytest.approx(0, abs=0.05)
    machine(0, all_cores=1, own_cores=1)
    assert others.next() == 0  # no time has passed


@pytest.mark.parametrize(
    ("others", "expected"), [(0.1, 4), (0.25, 4), (0.6, 3), (2.0, 2), (3.3, 1), (3.9, 1)]
)
def test_threads_are_as_many_as_cores_are_left(machine, threads, caplog, others, expected):
    caplog.set_level(logging.INFO)
    for _ in range(3):
        with load.threads_by_load():
            machine(1.1, others + 0.1, 0.1)
            threads.adapt()
            assert torch.get_num_threads() == threads.now
        assert torch.get_num_threads() == 4  # outside, a user's number
    with load.threads_by_load():
        assert torch.get_num_threads() == expected
    how = (
        f"other processes keep {others:.1f} of 4 cores busy: it computes with {expected} of 4"
        " threads while they do"
    )
    assert caplog.messages == [how] * (expected < 4)
    for _ in range(3):
        with load.threads_by_load():
            machine(1.1, 0.1, 0.1)
            threads.adapt()
    with load.threads_by_load():
        assert torch.get_num_threads() == 4


def test_a_long_block_counts_from_its_beginning_and_another_within_it_changes_nothing(
    machine, threads
):
    machine(60, all_cores=4, own_cores=0)  # what passed before it is left out
    with load.threads_by_load():
        machine(30, all_cores=2.1, own_cores=0.1)  # its first step takes this long
        threads.adapt()
        assert torch.get_num_threads() == 2
        with load.threads_by_load():
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 4
    machine(30, all_cores=4, own_cores=0)
    threads.adapt()
    assert torch.get_num_threads() == 4  # it is no such block


@pytest.mark.parametrize("busy", [True, False])
def test_the_first_step_already_has_the_threads_that_others_leave(
    machine, threads, monkeypatch, busy
):
    looks = []
    machine(60, all_cores=3 * busy, own_cores=0)

    def others_work(seconds):
        looks.append(seconds)
        machine(seconds, all_cores=3, own_cores=0)

    monkeypatch.setattr(time, "sleep", others_work)
    for _ in range(3):  # a look at the beginning of the first block, and none between blocks
        with load.threads_by_load():
            assert torch.get_num_threads() == (1 if busy else 4)
        machine(0.1, all_cores=3 * busy, own_cores=0)
    assert len(looks) == busy and torch.get_num_threads() == 4


def test_memory_is_known():
    assert 2**20 < load.available_memory() < 2**50
    before = load.memory_in_use()
    kept = torch.ones(2**27, dtype=torch.uint8)
    assert 0.8 * kept.nbytes < load.memory_in_use() - before < 1.2 * kept.nbytes


@pytest.mark.parametrize(
    ("most", "used", "expected"),
    [
        (None, None, 1_024_000),
        ("900000\n", "100000\n", 800_000),
        ("max\n", "100000\n", 1_024_000),
        ("900000\n", None, 1_024_000),
    ],
)
def test_memory_is_the_least_that_the_machine_and_the_group_leave(tmp_path, most, used, expected):
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    assert load.available_memory(tmp_path) == float("inf")
    (tmp_path / "proc").mkdir()
    lines = "MemTotal: 4000 kB\nMemFree:  10 kB\nMemAvailable:    1000 kB\n"
    (tmp_path / "proc" / "meminfo").write_text(lines)
    for name, text in (("memory.max", most), ("memory.current", used)):
        if text is not None:
            (group / name).write_text(text)
    assert load.available_memory(tmp_path) == expected
