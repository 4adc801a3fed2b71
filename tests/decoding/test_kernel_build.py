"""The library of operators is built once, from all that its name depends on, and again if it is damaged."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes import needs_compiler

from specheads.decoding.engine.cpu import library as kernel_build

SOURCES = {
    "number.h": "#pragma once\nint number();\n",
    "number.cpp": '#include "number.h"\nint number() { return 7; }\n',
    "twice.cpp": '#include "number.h"\nextern "C" int twice() { return 2 * number(); }\n',
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Sources of a small library in place of the operators'."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(kernel_build, "_FOLDER", folder)
    monkeypatch.setattr(kernel_build, "_GROUPS", (("number.cpp",), ("twice.cpp",)))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def commands(monkeypatch):
    """The commands that run in place of a compiler's; each writes its file."""
    commands, lock = [], threading.Lock()

    def run(command):
        with lock:
            commands.append(command)
        words = command.split()
        with open(words[words.index("-o") + 1], "w") as stream:
            stream.write(command)

    monkeypatch.setattr(kernel_build, "_run", run)
    return commands


def test_every_source_of_the_operators_is_compiled_once():
    compiled = [name for group in kernel_build._GROUPS for name in group]
    assert sorted(compiled) == sorted(path.name for path in kernel_build._FOLDER.glob("*.cpp"))


@needs_compiler
@pytest.mark.parametrize("name", SOURCES)
def test_the_name_depends_on_every_source(name, folder):
    before = kernel_build._library_path()
    assert kernel_build._library_path() == before
    (folder / name).write_text(SOURCES[name] + "// changed\n")
    assert kernel_build._library_path() != before


@needs_compiler
def test_the_name_depends_on_the_compiler_its_options_and_the_machine(folder, monkeypatch):
    paths = [kernel_build._library_path()]
    with monkeypatch.context() as changed:
        changed.setattr(kernel_build.artefacts, "machine", lambda: ("another",))
        paths.append(kernel_build._library_path())
    plain = kernel_build._command
    for kind in (".o", ".so"):
        with monkeypatch.context() as changed:
            changed.setattr(
                kernel_build, "_command", lambda name, *rest, kind=kind: plain(name, *rest) + " -g" * name.endswith(kind)
            )
            paths.append(kernel_build._library_path())
    assert len(set(paths)) == 4


@needs_compiler
def test_a_damaged_library_is_built_again(folder, caplog):
    path = kernel_build._library_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"no library")
    assert kernel_build._load_library(path).twice() == 14
    assert "cannot be loaded and are built again" in caplog.text
    assert ctypes.CDLL(None).twice() == 14  # visible to what is loaded later
    assert sorted(each.name for each in path.parent.iterdir()) == sorted([path.name, path.with_suffix(".lock").name])


@needs_compiler
def test_a_library_that_is_there_is_not_built(folder, commands):
    path = kernel_build._library_path()
    kernel_build._build(path)
    assert len(commands) == 3
    kernel_build._build(path)
    assert len(commands) == 3


@needs_compiler
def test_sources_that_are_compiled_together(folder, monkeypatch):
    monkeypatch.setattr(kernel_build, "_GROUPS", (("number.cpp", "twice.cpp"),))
    assert kernel_build._load_library(kernel_build._library_path()).twice() == 14


@needs_compiler
def test_groups_are_compiled_at_the_same_time(folder, commands, monkeypatch):
    """Each compilation waits until the other has begun."""
    run, both = kernel_build._run, threading.Barrier(2, timeout=60)

    def wait_and_run(command):
        if " -c " in command:
            both.wait()
        run(command)

    monkeypatch.setattr(kernel_build, "_run", wait_and_run)
    kernel_build._build(kernel_build._library_path())
    assert len(commands) == 3


@needs_compiler
def test_of_two_that_build_at_once_one_waits_for_the_other(folder, commands):
    path, start = kernel_build._library_path(), threading.Barrier(2, timeout=60)

    def build(_):
        start.wait()
        kernel_build._build(path)
        return path.read_text()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build, range(2))
    assert first == second and len(commands) == 3


@needs_compiler
def test_a_source_that_cannot_be_compiled(folder):
    (folder / "twice.cpp").write_text('#include "nothing.h"\n')
    path = kernel_build._library_path()
    with pytest.raises(RuntimeError, match="error: nothing.h: No such file"):
        kernel_build._load_library(path)
    assert [each.name for each in path.parent.iterdir()] == [path.with_suffix(".lock").name]
