"""Compiled steps on disk, so that a step is compiled once per machine and loaded in every later run.

They are in the folder `compiled` of the cache folder, one file per step, named by a hash of all that they depend on. The folder
may be removed at any time. Loading a file runs code, so only the user's private folder and files are read.
"""

import hashlib
import inspect
import logging
import os
import pickle
import platform
import stat
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specheads.decoding.engine.compiled_program import CompiledProgram, modules_in
from specheads.decoding.engine.eager import Epilogue
from specheads.pair.language_model import LanguageModel
from specheads.storage.files import cache_folder

logger = logging.getLogger(__name__)

PACKAGE, ENGINE = __name__.partition(".")[0], __name__.rpartition(".")[0]
KERNELS = "TORCHINDUCTOR_CACHE_DIR"  # the compiler's variable
# Raised by a damaged or outdated file; compiling again repairs it.
UNREADABLE = (
    pickle.PickleError,
    OverflowError,
    EOFError,
    OSError,
    ImportError,
    AttributeError,
    LookupError,
    ValueError,
    TypeError,
    RuntimeError,
    AssertionError,
)


def folder() -> Path:
    """Return where compiled steps are kept."""
    return cache_folder() / "compiled"


def keep_kernels_private() -> None:
    """Have the compiler keep its files next to the steps that refer to them, and exactly as long, if that folder is private.

    A folder that the user chose for the compiler stays; its own default, which importing it sets, does not.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes seconds to import

    if os.environ.get(KERNELS, default_cache_dir()) == default_cache_dir() and _is_usable(folder()):
        os.environ[KERNELS] = str(folder() / "kernels")


def name_of(lm: LanguageModel, epilogue: Epilogue, *settings: Any) -> str | None:
    """Return a hash of all that the compiled code of a model and an epilogue depends on.

    None: it cannot be described (a description that is an address, a class whose source cannot be read, a hook), so the code must
    not be kept.

    Args:
        settings: numbers and example tensors that it depends on too.
    """
    modules = [lm.model, *modules_in(epilogue.compile_key)]
    parts = [(name, part) for module in modules for name, part in module.named_modules()]
    sources = [_source(type(value)) for value in (epilogue, *vars(epilogue).values(), *(part for _, part in parts))]
    hooked = any(part._forward_hooks or part._forward_pre_hooks for _, part in parts)
    if " at 0x" in repr(epilogue.compile_key) or None in sources or hooked:
        return None
    weights = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    weights, settings = tree_map_only(Tensor, lambda x: (tuple(x.shape), x.stride(), x.dtype, x.device), (weights, settings))
    model = (type(lm.model).__name__, lm.config.to_json_string(), lm.config._attn_implementation, lm.vocab_size, weights)
    kinds = [(name, type(part), part.training) for name, part in parts]
    here = (machine(), _attention_kernels(), torch.get_num_threads())
    provenance = (*here, sources_of(ENGINE), sources, model, kinds, epilogue.compile_key, settings)
    return hashlib.sha256(repr(provenance).encode()).hexdigest()[:24]


def is_kept(name: str) -> bool:
    """Return whether a program of this name is on disk, or cannot be kept there."""
    return not _is_usable(folder()) or (folder() / name).is_file()


def load_or_compile(name: str | None, compile_program: Callable[[], CompiledProgram]) -> tuple[CompiledProgram, bool]:
    """Return the program called `name` and whether it was on disk; one that was not is kept there.

    Args:
        name: None for a program that must not be kept.
    """
    if name is None or not _is_usable(folder()):
        return compile_program(), False
    keep_kernels_private()
    path = folder() / name
    try:
        content = _read_private(path)
        if content is not None:
            return CompiledProgram.from_bytes(_checked(content)), True
    except UNREADABLE as error:
        logger.warning("the compiled step %s cannot be used and is compiled again: %s", path, error)
    compiled_program = compile_program()
    try:
        if compiled_program.is_general:
            code = compiled_program.to_bytes()
            _write_private(path, hashlib.sha256(code).digest() + code)
    except UNREADABLE as error:
        logger.warning("the compiled step is not kept for later runs: %s", error)
    return compiled_program, False


def _is_usable(path: Path) -> bool:
    """Whether `path` is a private folder of the current user, who gets one if it does not exist; a warning says why not."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = path.lstat()
    except OSError as error:
        _warn(f"compiled steps are not kept for later runs: {error}")
        return False
    if _is_own(status) and stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700:
        return True
    _warn(
        f"compiled steps are neither read from {path} nor kept there, because it is not a folder that only you can access, and "
        f"loading them runs code; remove it, or if you trust its content run chmod 700 {path}"
    )
    return False


def _read_private(path: Path) -> bytes | None:
    """Return the content of a file, or None if it does not exist.

    Raises:
        PermissionError: a file that is not the current user's, or that others may write.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not (_is_own(status) and stat.S_ISREG(status.st_mode)) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError("it is not a file that only you can write, and loading it runs code")
        return stream.read()


def _checked(content: bytes) -> bytes:
    """Return a program without the checksum before it. Raises ValueError if it was damaged: its code would run nevertheless."""
    size = hashlib.sha256().digest_size
    if hashlib.sha256(content[size:]).digest() != content[:size]:
        raise ValueError("it was damaged, as its checksum differs")
    return content[size:]


def _write_private(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # other processes may be compiling the same step
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as stream:
        stream.write(content)
    os.replace(temporary, path)


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid()


@cache  # a decoder compiles several steps, and one warning is enough
def _warn(message: str) -> None:
    logger.warning("%s", message)


@cache
def machine() -> tuple[str, ...]:
    """Return the versions and processors that compiled code depends on."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    cpu = (platform.machine(), torch.backends.cpu.get_cpu_capability(), *_cpu_flags())
    return (torch.__version__, transformers.__version__, platform.python_version(), *cpu, *gpus)


def _attention_kernels() -> tuple[Any, ...]:
    """Return what torch's attention may choose from on a GPU, and the versions of the libraries: a trace holds its choice."""
    flags = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
    return *flags, torch.version.cuda, torch.backends.cudnn.version(), _triton_version()


@cache
def _triton_version() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _cpu_flags() -> list[str]:
    """Return this processor's features: code for one processor may not run on another that shares the folder."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else [platform.processor()]
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))} or lines[:1])


@cache
def sources_of(module: str) -> str:
    """Return a hash of a module of this package and of those that it imports, at any depth; other names have no source here."""
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in reached or not name.startswith(f"{PACKAGE}."):
            continue
        reached.add(name)
        for key, value in vars(sys.modules[name]).items():
            other = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(other, str) and other in sys.modules and other != f"{name}.{key}":  # a submodule that something loaded
                waiting.append(other)
    files = [sys.modules[name].__file__ for name in sorted(reached)]
    return hashlib.sha256("".join(_hash_of(file) for file in files if file).encode()).hexdigest()


def _source(kind: type) -> str | None:
    """Return a hash of the file that defines a class, such as a user's rule or a model's code, and of what it imports from here.

    None: there is no such file.
    """
    if kind.__module__ == "builtins":
        return ""
    try:
        return _hash_of(inspect.getfile(kind)) + sources_of(kind.__module__)
    except (TypeError, OSError):
        return None


@cache
def _hash_of(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
