"""Steps are compiled ahead by forked processes, and what fails there is compiled, and reported,
where it is needed.
"""

import logging
import os
from functools import partial

import pytest
import torch
from fakes import needs_compiler, tiny_pair
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from specheads import SpeculativeDecoder, Warp, stopping
from specheads.decoding.engine import artefacts, cpu
from specheads.decoding.engine.artefacts import Job, _run_in_processes, folder

GREEDY = Warp(temperature=0)

needs_fork = pytest.mark.skipif(
    not hasattr(os, "fork") or (os.cpu_count() or 1) == 1, reason="one core, or no fork"
)


def decoder(engine):
    return SpeculativeDecoder(
        tiny_pair(), stopping=stopping.FixedLength(3), warp=GREEDY, engine=engine
    )


@pytest.fixture(autouse=True)
def private_folders(monkeypatch, tmp_path):
    cpu.load_operators()  # which all tests share
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # which the first step moves


@needs_compiler
@needs_fork
def test_forked_processes_leave_the_steps_that_the_parent_loads(caplog):
    caplog.set_level(logging.DEBUG, "specheads")
    compiled = decoder("compiled")
    compiled.warm_up()
    # The processes' own lines are theirs: here steps are only loaded.
    assert "loaded ChainStep" in caplog.text and "loaded VerifyStep" in caplog.text
    assert "compiled ChainStep" not in caplog.text and "compiled VerifyStep" not in caplog.text
    # The verification of one token is one
    assert len([path for path in folder().iterdir() if path.is_file()]) == 4
    assert (
        compiled.generate([0, 1, 2], 20).tokens.tolist()
        == decoder("eager").generate([0, 1, 2], 20).tokens.tolist()
    )
    assert torch.get_num_threads() >= 1 and artefacts.planned.get() is None


@needs_compiler
def test_repeated_steps_need_fewer_compiled_ones_than_generation():
    compiled = decoder("compiled")
    compiled.prepare_repeated(verified=(2, 4))
    for run in (compiled.draft_steps(2, context=8), compiled.verification_step(4, context=8)):
        run()
    prepared = [engine.num_prepared for engine in compiled.engines]
    assert prepared == [1, 1]
    compiled.prepare()
    assert [engine.num_prepared for engine in compiled.engines] == [2, 2]


@needs_fork
def test_jobs_begin_in_their_order(tmp_path):
    """One at a time, so that the order in which they end is that in which they began.

    One that fails does no harm.
    """
    path = tmp_path / "order"

    def write(size):
        with path.open("a") as stream:
            stream.write(f"{size} ")
        raise RuntimeError("nothing to keep")

    jobs = [Job(f"step {size}", f"name{size}", partial(write, size), size) for size in (9, 4, 2)]
    said = []
    _run_in_processes(jobs, most=1, say=said.append)
    known = [f"compiling decoding steps ({count} of 3), once per machine" for count in range(4)]
    assert said == sorted(said) and set(said) <= set(known)
    assert path.read_text().split() == ["9", "4", "2"]
