"""The library of operators is built once, from all that its name depends on."""

import ctypes
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes import needs_compiler

from specheads.decoding.engine import cpu as kernel_build

SOURCES = {
    "number.h": "#pragma once\ninline int number() { return 7; }\n",
    "operators.cpp": '#include "number.h"\nextern "C" int twice() { return 2 * number(); }\n',
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Sources of a small library in place of the operators'."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(kernel_build, "_FOLDER", folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def builds(monkeypatch):
    """The commands that build operators."""
    commands = []
    begin = subprocess.Popen

    def counted(command, *args, **options):
        if any("operators.cpp" in str(word) for word in command):
            commands.append(command)
        return begin(command, *args, **options)

    monkeypatch.setattr(kernel_build.subprocess, "Popen", counted)
    return commands


@needs_compiler
@pytest.mark.parametrize("name", SOURCES)
def test_the_name_depends_on_every_source(name, folder):
    before = kernel_build._library_path()
    assert kernel_build._library_path() == before
    (folder / name).write_text(SOURCES[name] + "// changed\n")
    assert kernel_build._library_path() != before


@needs_compiler
def test_a_library_is_visible_to_what_is_loaded_later(folder):
    path = kernel_build._library_path()
    assert kernel_build._load_library(path).twice() == 14
    assert ctypes.CDLL(None).twice() == 14


@needs_compiler
def test_of_two_that_build_at_once_one_waits_for_the_other(folder, builds):
    path = kernel_build._library_path()
    start = threading.Barrier(2, timeout=60)

    def build(_):
        start.wait()
        kernel_build._build(path)
        return path.read_bytes()

    builds.clear()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build, range(2))
    kernel_build._build(path)
    assert first == second and len(builds) == 1


@needs_compiler
def test_a_source_that_cannot_be_compiled(folder):
    (folder / "operators.cpp").write_text('#include "nothing.h"\n')
    path = kernel_build._library_path()
    with pytest.raises(RuntimeError, match="error: nothing.h: No such file"):
        kernel_build._load_library(path)
    assert [each.name for each in path.parent.iterdir()] == [path.with_suffix(".lock").name]
