"""Steps are compiled ahead by forked processes, and what fails there is compiled, and reported, where it is needed."""

import logging
import os
import time
from functools import partial

import pytest
import torch
from commands import wait_for
from fakes import needs_compiler, tiny_pair
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from specheads import SpeculativeDecoder, Warp, stopping
from specheads.decoding.engine import compile_plan
from specheads.decoding.engine.artefacts import folder
from specheads.decoding.engine.compile_plan import Job, Plan, run_in_processes

GREEDY = Warp(temperature=0)


def decoder(engine):
    return SpeculativeDecoder(tiny_pair(), stopping=stopping.FixedLength(3), warp=GREEDY, engine=engine)


@pytest.fixture(autouse=True)
def private_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # which the first step moves


@needs_compiler
@pytest.mark.skipif(not compile_plan.can_fork(), reason="one core, or no fork")
def test_forked_processes_leave_the_steps_that_the_parent_loads(caplog):
    caplog.set_level(logging.INFO)
    compiled = decoder("compiled")
    compiled.warm_up()
    # The processes' own lines are theirs: here steps are only loaded.
    assert "loaded ChainStep" in caplog.text and "loaded VerifyStep" in caplog.text
    assert "compiled ChainStep" not in caplog.text and "compiled VerifyStep" not in caplog.text
    assert len([path for path in folder().iterdir() if path.is_file()]) == 3
    assert compiled.generate([0, 1, 2], 20).tokens.tolist() == decoder("eager").generate([0, 1, 2], 20).tokens.tolist()
    assert torch.get_num_threads() >= 1 and Plan.active is None


@pytest.mark.skipif(not compile_plan.can_fork(), reason="one core, or no fork")
def test_a_process_that_fails_is_said_and_does_no_harm(caplog):
    caplog.set_level(logging.INFO)

    def fail():
        raise RuntimeError("no such instruction")

    run_in_processes([Job(f"step {number}", f"name{number}", fail) for number in range(3)], most=2)
    assert sorted(record.message for record in caplog.records) == [f"step {number} was not compiled ahead" for number in range(3)]


@pytest.mark.skipif(not compile_plan.can_fork(), reason="one core, or no fork")
def test_the_longest_steps_are_compiled_first(tmp_path):
    """One at a time, so that the order in which they end is that in which they began."""
    path = tmp_path / "order"

    def write(size):
        with path.open("a") as stream:
            stream.write(f"{size} ")
        raise RuntimeError("nothing to keep")

    plan = [Job(f"step {size}", f"name{size}", partial(write, size), size) for size in (2, 9, 4)]
    run_in_processes(compile_plan.longest_first(plan), most=1)
    assert path.read_text().split() == ["9", "4", "2"]


@pytest.mark.skipif(not compile_plan.can_fork(), reason="one core, or no fork")
@pytest.mark.parametrize("fails", [False, True])
def test_another_process_builds_while_the_compiler_is_loaded(monkeypatch, tmp_path, fails):
    """Each waits for the other here, so that neither could come first; a compiler that fails changes nothing."""
    loading, built = tmp_path / "loading", tmp_path / "built"

    def load():
        loading.touch()
        wait_for(built.exists, seconds=600)
        if fails:
            raise RuntimeError("no such instruction")

    def build():
        wait_for(loading.exists, seconds=600)
        built.touch()

    monkeypatch.setattr(compile_plan, "load_compiler", load)
    compile_plan.load_compiler_during(build)
    assert built.exists()


@pytest.mark.skipif(not compile_plan.can_fork(), reason="one core, or no fork")
def test_an_interrupt_ends_the_process_that_builds(monkeypatch):
    started = []
    fork = compile_plan.fork
    monkeypatch.setattr(compile_plan, "fork", lambda run: started.append(fork(run)) or started[0])

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_plan, "load_compiler", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_plan.load_compiler_during(partial(time.sleep, 600))
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


@needs_compiler
def test_a_compiler_that_cannot_be_loaded_ahead_changes_nothing(monkeypatch):
    def fail():
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(compile_plan, "load_compiler", fail)
    tokens = decoder("compiled").generate([0, 1, 2], 20).tokens.tolist()
    assert tokens == decoder("eager").generate([0, 1, 2], 20).tokens.tolist()


def test_plans_are_not_nested():
    with Plan(), pytest.raises(RuntimeError, match="nested"), Plan():
        pass
    assert Plan.active is None
