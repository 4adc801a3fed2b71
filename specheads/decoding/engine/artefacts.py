"""Compiled steps on disk, one file per step, named by a hash of all that it depends on.

Loading a file runs code.

A compiler uses one core, and most of its time is Python's. `compile_ahead` therefore compiles
several steps at a time, in forks, which neither load nor copy models. What cannot be compiled there
is compiled, and its errors are reported, where it is needed.
"""

import hashlib
import inspect
import logging
import multiprocessing
import os
import platform
import re
import stat
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from specheads.decoding.engine.compiled_program import CPU_OPTIONS, CompiledProgram, modules_in
from specheads.decoding.engine.eager import Epilogue
from specheads.interrupts import listen
from specheads.pair.language_model import LanguageModel
from specheads.progress import waiting
from specheads.storage.files import cache_folder, write_whole

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[2]
_ROOMS = ("decoding", "heads", "pair")  # steps depend on the sources of these folders
_KERNELS = "TORCHINDUCTOR_CACHE_DIR"  # the compiler's variable
_MOST_PROCESSES = 8
_MOST_SECONDS = 1200.0  # compilations that take longer are given up
_LOOK_SECONDS = 0.5  # between two looks at how far they are


class Job(NamedTuple):
    """A step to compile."""

    what: str
    name: str | None  # the name of its file; None: it must not be kept
    compile_program: Callable[[], CompiledProgram]
    size: int = 0  # the larger, the longer it takes to compile


# While it is a dictionary, warm-ups of this thread add to it and prepare nothing
planned: ContextVar[dict[Hashable, Job] | None] = ContextVar("planned", default=None)
# Held while a step is traced or compiled: torch patches the whole process meanwhile
COMPILING = threading.RLock()


def compile_ahead(warm_ups: Iterable[Callable[[], object]]) -> None:
    """Compile the steps that `warm_ups` would prepare and that are not on disk, several at a
    time.
    """
    # CUDA does not survive a fork after it was initialised.
    if (
        planned.get() is not None
        or not hasattr(os, "fork")
        or (os.cpu_count() or 1) == 1
        or torch.cuda.is_initialized()
    ):
        return
    found: dict[Hashable, Job] = {}
    before = planned.set(found)
    try:
        for warm_up in warm_ups:
            warm_up()
    finally:
        planned.reset(before)
    if not _is_usable(folder()):
        return
    jobs = dict[str, Job]()
    for job in found.values():
        if job.name is not None and not (folder() / job.name).is_file():
            jobs[job.name] = job
    if len(jobs) > 1:
        logger.info("compiling %d steps of the models, once for this machine", len(jobs))
        with COMPILING, suppress(Exception), waiting("loading the compiler") as say:
            load_compiler()
            _run_in_processes(
                sorted(jobs.values(), key=lambda job: -job.size),
                min(_MOST_PROCESSES, os.cpu_count() or 1),
                say,
            )


@cache
def load_compiler() -> None:
    """Compile a small step with the steps' options: each fork would load or build its modules and
    headers for itself.
    """
    CompiledProgram.compile(nn.Softmax(dim=-1), (torch.zeros(1, 3),), {0: 1}, CPU_OPTIONS)


def _run_in_processes(jobs: Sequence[Job], most: int, say: Callable[[str], None]) -> None:
    """Compile jobs in this order, `most` at a time; `say` takes how far they are."""
    context = multiprocessing.get_context("fork")
    taken = context.Value("i", 0)
    end = time.monotonic() + _MOST_SECONDS
    processes = [
        context.Process(target=_compile_in_fork, args=(jobs, taken))
        for _ in range(min(most, len(jobs)))
    ]
    with warnings.catch_warnings():
        # Python warns of threads, which do not exist in the fork; nothing there waits for them.
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            begun = min(taken.value, len(jobs))
            say(f"compiling decoding steps ({begun} of {len(jobs)}), once per machine")
            connection.wait([process.sentinel for process in processes], _LOOK_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compile_in_fork(jobs: Sequence[Job], taken: "Synchronized[int]") -> NoReturn:
    """Compile one job after the other that no other process has taken."""
    from torch._inductor import config  # takes seconds to import

    listen(lambda number, frame: None)  # the first process ends this one
    logging.getLogger("specheads").setLevel(logging.WARNING)  # it has said it for all
    torch.set_num_threads(1)  # OpenMP's threads do not exist here
    config.compile_threads = 1
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value = taken.value + 1
        if number >= len(jobs):
            os._exit(0)
        with suppress(Exception):
            load_or_compile(jobs[number].name, jobs[number].compile_program)


def folder() -> Path:
    """Return where compiled steps are kept."""
    return cache_folder() / "compiled"


def keep_kernels_private() -> None:
    """Have the compiler keep its files next to the steps that refer to them, and exactly as long,
    if that folder is private.

    A folder that the user chose for the compiler stays; its own default, which importing it sets,
    does not.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes seconds to import

    if os.environ.get(_KERNELS, default_cache_dir()) == default_cache_dir() and _is_usable(
        folder()
    ):
        os.environ[_KERNELS] = str(_without_spaces(folder()) / "kernels")


def _without_spaces(path: Path) -> Path:
    """Return a path of this folder without spaces, at which the compiler's command lines would
    break: a link to it, which only this user can have made.
    """
    if not re.search(r"\s", str(path)):
        return path
    name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    link = Path(tempfile.gettempdir(), f"specheads-{os.getuid()}-{name}")
    with suppress(FileExistsError):
        link.symlink_to(path)
    if link.lstat().st_uid == os.getuid() and link.is_symlink() and link.readlink() == path:
        return link
    warn_once(f"{link} is not this user's link to {path}; remove it, or set SPECHEADS_CACHE")
    return path


def remove_broken_libraries() -> bool:
    """Remove the compiler's libraries that were not written to their end, as a process leaves them
    that is killed while it links; return whether there were any.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes seconds to import

    broken = [path for path in Path(cache_dir()).rglob("*.so") if not _is_whole(path)]
    for path in broken:
        logger.warning("%s was not written to its end and is made again", path)
        path.unlink(missing_ok=True)
    return bool(broken)


def _is_whole(path: Path) -> bool:
    """Whether a library has what its ELF header says; one of another format is not empty."""
    with path.open("rb") as stream:
        header = stream.read(64)
    if header[:5] != b"\x7fELF\x02" or len(header) < 64:
        return bool(header) and header[:4] != b"\x7fELF"
    (sections,) = struct.unpack_from("<Q", header, 40)
    size, number = struct.unpack_from("<HH", header, 58)
    return path.stat().st_size >= sections + size * number


def load_or_compile(
    name: str | None, compile_program: Callable[[], CompiledProgram]
) -> tuple[CompiledProgram, bool]:
    """Return the program called `name` and whether it was on disk.

    One that was not is kept there, if it has a name. One thread after the other; where a library of
    the compiler is broken, it is made again.
    """
    with COMPILING:
        if name is None or not _is_usable(folder()):
            return compile_program(), False
        keep_kernels_private()
        try:
            return _load_or_compile(name, compile_program)
        except Exception:
            if not remove_broken_libraries():
                raise
            return _load_or_compile(name, compile_program)


def _load_or_compile(
    name: str, compile_program: Callable[[], CompiledProgram]
) -> tuple[CompiledProgram, bool]:
    path = folder() / name
    if path.is_file():
        try:
            content = path.read_bytes()
            code = content[32:]
            if hashlib.sha256(code).digest() != content[:32]:
                # Its code would run nevertheless
                raise ValueError("it was damaged, as its checksum differs")
            return CompiledProgram.from_bytes(code), True
        # A damaged or outdated file fails in many ways; compiling repairs it.
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "the compiled step %s cannot be used and is compiled again: %s", path, error
            )
            remove_broken_libraries()
    compiled_program = compile_program()
    try:
        if compiled_program.is_general:
            code = compiled_program.to_bytes()
            content = hashlib.sha256(code).digest() + code
            write_whole(
                path, lambda temporary: temporary.write_bytes(content), writer=str(os.getpid())
            )
            # As later processes have it: what a compiler returns is called through more wrappers
            # than what was loaded.
            return CompiledProgram.from_bytes(code), False
    except Exception as error:  # noqa: BLE001  # of many kinds where a step cannot be written
        logger.warning("the compiled step is not kept for later runs: %s", error)
    return compiled_program, False


def _is_usable(path: Path) -> bool:
    """Whether `path` is a private folder of the current user, who gets one if it does not exist.

    A warning says why not.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = path.lstat()
    except OSError as error:
        warn_once(f"compiled steps are not kept for later runs: {error}")
        return False
    if (
        status.st_uid == os.getuid()
        and stat.S_ISDIR(status.st_mode)
        and stat.S_IMODE(status.st_mode) == 0o700
    ):
        return True
    warn_once(
        f"compiled steps are neither read from {path} nor kept there, because it is not a folder"
        " that only you can access, and loading them runs code; remove it, or if you trust its"
        f" content run chmod 700 {path}"
    )
    return False


@cache  # every step of every engine may ask, and one warning is enough
def warn_once(message: str) -> None:
    """Log a warning that was not logged before."""
    logger.warning("%s", message)


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook may change what a module computes.

    Those that transformers leaves behind where hidden states were asked for only read.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks)


def name_of(lm: LanguageModel, epilogue: Epilogue, *settings: object) -> str | None:
    """Return a hash of all that the compiled code of a model and an epilogue depends on, also
    numbers and example tensors.

    None: it cannot be described (a description that is an address, a class whose source cannot be
    read, a hook), so the code must not be kept.
    """
    modules = [lm.model, *modules_in(epilogue.compile_key)]
    parts = list[tuple[str, nn.Module]]()
    weights = list[Tensor]()
    for module in modules:
        parts += module.named_modules()
        weights += [*module.parameters(), *module.buffers()]
    sources = [_source(type(value)) for value in (epilogue, *vars(epilogue).values())]
    sources += [_source(type(part)) for _, part in parts]
    hooked = any(is_hooked(part) for _, part in parts)
    if " at 0x" in repr(epilogue.compile_key) or None in sources or hooked:
        return None
    weights, settings = tree_map_only(
        Tensor, lambda x: (tuple(x.shape), x.stride(), x.dtype, x.device), (weights, settings)
    )
    model = (
        type(lm.model).__name__,
        lm.config.to_json_string(),
        lm.config._attn_implementation,
        lm.vocab_size,
        weights,
    )
    kinds = [(name, type(part), part.training) for name, part in parts]
    here = (machine(), torch.get_num_threads())
    provenance = (*here, sources_of(*_ROOMS), sources, model, kinds, epilogue.compile_key, settings)
    return hashlib.sha256(repr(provenance).encode()).hexdigest()[:24]


@cache
def machine() -> tuple[str, ...]:
    """Return the versions and processors that compiled code depends on."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    # Code for one processor may not run on another that shares the folder
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else [platform.processor()]
    features = sorted(
        {line for line in lines if line.startswith(("flags", "Features", "model name"))}
        or lines[:1]
    )
    cpu = (platform.machine(), torch.backends.cpu.get_cpu_capability(), *features)
    versions = (torch.__version__, transformers.__version__, platform.python_version())
    return (*versions, *cpu, *gpus)


@cache
def sources_of(*rooms: str) -> str:
    """Return a hash of the Python sources of some folders of this package."""
    paths = list[Path]()
    for room in rooms:
        paths += sorted((_PACKAGE / room).rglob("*.py"))
    return hashlib.sha256("".join(map(_hash_of, paths)).encode()).hexdigest()


def _source(kind: type) -> str | None:
    """Return a hash of the file that defines a class (a user's rule, a model) if there is one, or
    of its room in this package.
    """
    package, *room = kind.__module__.split(".")[:2]
    if package in ("builtins", _PACKAGE.name):
        return sources_of(*room)
    try:
        return _hash_of(Path(inspect.getfile(kind)))
    except (TypeError, OSError):
        return None


@cache
def _hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
