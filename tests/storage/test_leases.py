import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from specheads.errors import UserError
from specheads.storage import leases as module
from specheads.storage.leases import Holder, Leases, each_free, timeout_seconds

LONG, SHORT = 600.0, 0.2  # seconds: a lease that nothing but its holder's end frees, and one that ends in this test


@pytest.fixture
def worker(tmp_path):
    """Return a function that starts a process that takes the lease `a`, and waits for the end of its standard input."""
    started = []

    def start(timeout):
        code = (
            "import sys, pathlib; from specheads.storage.leases import Leases\n"
            f"with Leases(pathlib.Path({str(tmp_path)!r}), {timeout}) as leases:\n"
            "    print(leases.take('a'), flush=True); sys.stdin.read(); print(leases.holds('a'), flush=True)"
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen([sys.executable, "-c", code], text=True, **pipes))
        assert started[-1].stdout.readline() == "True\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def foreign(path, **changes):
    """Write the lease of a process elsewhere."""
    holder = replace(Holder.this(), **{"machine": "another", "host": "node7", "process": 12, **changes})
    path.write_text(json.dumps({"lease": "x", "renewals": "0", "holder": vars(holder)}))


def test_only_one_holds_a_lease_until_it_gives_it_back(tmp_path):
    with Leases(tmp_path, LONG) as one, Leases(tmp_path, LONG) as other:
        assert one.take("a") and one.holds("a")
        assert not other.take("a") and not other.holds("a")
        assert other.take("b")
        one.release("a")
        assert other.take("a") and not one.holds("a")
    assert not list(tmp_path.iterdir())


def test_the_end_of_a_block_gives_leases_back_after_an_error_too(tmp_path):
    def work():
        with Leases(tmp_path, LONG) as leases:
            for _ in each_free(leases, ["a"], lambda name: False):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert not list(tmp_path.iterdir())


def test_the_lease_of_a_killed_process_is_free_at_once_but_not_that_of_a_live_one(tmp_path, worker):
    process = worker(LONG)
    with Leases(tmp_path, LONG) as leases:
        assert not leases.take("a")
        process.kill()
        process.wait()
        assert leases.take("a") and leases.holds("a")


def test_a_process_number_that_was_used_again_is_another_process(tmp_path):
    foreign(tmp_path / ".a.lease", machine=Holder.this().machine, process=os.getpid(), started="1")
    with Leases(tmp_path, LONG) as leases:
        assert leases.take("a")


def test_a_lease_of_another_machine_is_free_when_it_has_not_changed_for_the_timeout(tmp_path, caplog):
    foreign(tmp_path / ".a.lease")
    os.utime(tmp_path / ".a.lease", (0, 0))  # by that machine's clock it is 1970
    with Leases(tmp_path, SHORT) as leases:
        assert not leases.take("a")  # not known to be old yet
        time.sleep(2 * SHORT)
        with caplog.at_level("WARNING"):
            assert leases.take("a")
    assert "process 12 on node7 has not renewed its lease for 0 s" in caplog.text


def test_a_lease_that_is_renewed_is_kept(tmp_path, worker):
    process = worker(SHORT)
    with Leases(tmp_path, 5 * SHORT) as leases:
        for _ in range(12):
            assert not leases.take("a")
            time.sleep(SHORT)
    assert process.communicate("")[0] == "True\n"


def test_a_suspended_holder_loses_its_lease_and_notices(tmp_path, worker):
    process = worker(SHORT)
    process.send_signal(signal.SIGSTOP)
    with Leases(tmp_path, SHORT) as leases:
        assert not leases.take("a")
        time.sleep(2 * SHORT)
        assert leases.take("a")
        process.send_signal(signal.SIGCONT)
        assert process.communicate("")[0] == "False\n"
        assert leases.holds("a")  # the other one has renewed, and given back, a file that is no longer there


@pytest.mark.parametrize("content", ["", "{", "[]", "\0\0"])
def test_a_lease_that_cannot_be_read_is_free_after_the_timeout(tmp_path, content):
    (tmp_path / ".a.lease").write_text(content)
    with Leases(tmp_path, SHORT) as leases:
        assert not leases.take("a")
        time.sleep(2 * SHORT)
        assert leases.take("a")


def test_other_versions_at_work_are_refused_and_old_leases_of_them_are_not(tmp_path):
    packages = Holder.this().packages | {"torch": "1.0"}
    foreign(tmp_path / ".a.lease", packages=packages)
    with (
        Leases(tmp_path, LONG) as leases,
        pytest.raises(UserError, match=r"process 12 on node7 .* with torch 1\.0; this"),
    ):
        leases.take("a")
    foreign(tmp_path / ".a.lease", packages=packages, machine=Holder.this().machine, process=2**22 + 1)
    with Leases(tmp_path, LONG) as leases:
        assert leases.take("a")


def test_many_workers_do_every_part_of_a_work_once(tmp_path):
    names = [f"{number:02d}" for number in range(40)]
    by_worker, elsewhere = [[] for _ in range(4)], [[] for _ in range(4)]

    def work(made, seen):
        with Leases(tmp_path, LONG) as leases:
            for name in each_free(leases, names, lambda name: (tmp_path / name).exists(), seen.append):
                made.append(name)
                time.sleep(0.002)
                (tmp_path / name).touch()

    threads = [threading.Thread(target=work, args=each) for each in zip(by_worker, elsewhere, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for made in by_worker for name in made) == names
    for number, seen in enumerate(elsewhere):  # but for what was done before a worker began
        assert len(set(seen)) == len(seen) and not set(seen) & set(by_worker[number])
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_who_waits_says_for_what_and_goes_on_with_what_a_dead_worker_left(tmp_path, worker, caplog):
    process = worker(LONG)
    threading.Timer(0.3, process.kill).start()
    with caplog.at_level(logging.INFO), Leases(tmp_path, LONG) as leases:
        for name in each_free(leases, ["a"], lambda name: (tmp_path / name).exists()):
            process.wait()
            (tmp_path / name).touch()
    assert "waiting for other workers, who are making a" in caplog.text
    assert f"a: its worker, process {process.pid}, has ended" in caplog.text


@pytest.mark.parametrize("given", ["0", "-1", "soon", "inf", "nan"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused_by_name(monkeypatch, given):
    monkeypatch.setenv(module.TIMEOUT, given)
    with pytest.raises(UserError, match=f"SPECHEADS_LEASE_SECONDS={given} must be a number"):
        timeout_seconds()
