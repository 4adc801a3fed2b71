"""Compiled steps are code: they are read only from a folder that nobody else can access."""

import logging
import os
import pickle
import subprocess
import sys

import pytest
from fakes import needs_compiler

from specheads.decoding.engine import artefacts
from specheads.decoding.engine.artefacts import folder, load_or_compile

NAME = "step"


class Marker:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


class Step:
    """A stand-in for a compiled program."""

    is_general = True

    def to_bytes(self):
        return b"code"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    artefacts.warn_once.cache_clear()


def plant(path):
    """Write a file that runs code when it is loaded; return the trace that the code would leave."""
    trace = path.parent / "trace"
    path.write_bytes(pickle.dumps(Marker(trace)))
    return trace


def test_the_folder_is_private():
    load_or_compile(NAME, Step)
    assert folder().stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder().iterdir()] == [NAME] and (folder() / NAME).read_bytes()[
        32:
    ] == b"code"


def test_a_folder_that_others_can_access_is_not_read(caplog):
    caplog.set_level(logging.WARNING)
    folder().mkdir()
    trace = plant(folder() / NAME)
    folder().chmod(0o701)
    for _ in range(2):
        compiled_program, was_kept = load_or_compile(NAME, Step)
        assert isinstance(compiled_program, Step) and not was_kept
    assert not trace.exists() and sorted(path.name for path in folder().iterdir()) == [NAME]
    expected = (
        f"compiled steps are neither read from {folder()} nor kept there, because it is not a"
        " folder that only you can access, and loading them runs code; remove it, or if you trust"
        f" its content run chmod 700 {folder()}"
    )
    assert [record.message for record in caplog.records] == [expected]


def test_a_folder_of_another_user_is_not_read(monkeypatch, caplog):
    folder().mkdir(mode=0o700)
    trace = plant(folder() / NAME)
    monkeypatch.setattr(artefacts.os, "getuid", lambda: os.stat(folder()).st_uid + 1)
    assert not load_or_compile(NAME, Step)[1]
    assert not trace.exists() and "not a folder that only you can access" in caplog.text


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder().symlink_to(tmp_path / "elsewhere")
    trace = plant(folder() / NAME)
    assert not load_or_compile(NAME, Step)[1]
    assert not trace.exists() and "not a folder that only you can access" in caplog.text


def test_without_a_folder_steps_are_compiled_all_the_same(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "file"))
    assert not load_or_compile(NAME, Step)[1]
    assert "not kept for later runs" in caplog.text


def test_a_damaged_step_is_compiled_again(monkeypatch, caplog):
    loaded = []
    monkeypatch.setattr(
        artefacts.CompiledProgram, "from_bytes", lambda content: loaded.append(content) or content
    )
    load_or_compile(NAME, Step)
    path = folder() / NAME
    path.write_bytes(path.read_bytes()[:-1] + b"d")
    assert load_or_compile(NAME, Step) == (b"code", False)
    assert loaded == [b"code", b"code"]
    assert "compiled again: it was damaged" in caplog.text


SCRIPT = """
import logging, sys
import torch
from torch import nn
from specheads.decoding.engine.artefacts import load_or_compile
from specheads.decoding.engine.compiled_program import CPU_OPTIONS, CompiledProgram

logging.basicConfig(level=logging.WARNING, format="%(message)s")
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(8, 8), nn.Softmax(dim=-1))
x = torch.rand(3, 8)

def compiled():
    return CompiledProgram.compile(module, (x,), {0: 0}, CPU_OPTIONS)

program, was_kept = load_or_compile("step", compiled)
tensors = dict(module.named_parameters())
out = program.artifact(*(tensors[name] for name in program.sources), x)
assert torch.allclose(out[0], module(x)), "another result"
print(was_kept)
"""


@needs_compiler
def test_libraries_that_a_kill_left_behind_are_made_again(tmp_path):
    """Also in a folder whose path has a space, at which command lines would break."""
    cache = tmp_path / "my cache"
    environment = {**os.environ, "SPECHEADS_CACHE": str(cache)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR")

    def run():
        words = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(words, check=False, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr

    assert run() == ("False", "")
    (library,) = cache.rglob("*.main.so")  # others try instructions of the processor
    content = library.read_bytes()
    library.write_bytes(b"")
    kept, said = run()
    assert kept == "False" and said.count("was not written to its end") == 1
    library.write_bytes(content[: len(content) // 2])
    run()  # the rest may be what only debuggers read; the script checks the result
    assert run() == ("True", "")
