"""Compiled units on disk, so that a unit is compiled once per machine and loaded in every run after that.

They lie in `compiled` of the cache folder, one file per unit, named by a hash of all that they depend
on. The folder may be removed at any time. The files are code: load none that somebody else has written.
"""

import hashlib
import inspect
import logging
import os
import pickle
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specheads.decoding.engine.compiled_program import Program, modules_in
from specheads.decoding.engine.eager import Epilogue
from specheads.pair import LanguageModel
from specheads.storage.files import cache_folder

logger = logging.getLogger(__name__)


# What a damaged or outdated file raises; compiling anew puts it right.
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
)
UNREADABLE += (RuntimeError, AssertionError)


def folder() -> Path:
    """Return where compiled units are kept."""
    return cache_folder() / "compiled"


def name_of(lm: LanguageModel, epilogue: Epilogue, *facts: Any) -> str | None:
    """Return what tells apart the compiled code of a model, the work after it and `facts` (numbers and example tensors).

    None: it cannot be said what they are (a description that is an address, a class whose source cannot be read, a hook), so that
    the code must not be kept.
    """
    whole = [lm.model, *modules_in(epilogue.compile_key)]
    parts = [(name, part) for module in whole for name, part in module.named_modules()]
    sources = [_source(type(one)) for one in (epilogue, *vars(epilogue).values(), *(part for _, part in parts))]
    hooked = any(part._forward_hooks or part._forward_pre_hooks for _, part in parts)
    if " at 0x" in repr(epilogue.compile_key) or None in sources or hooked:
        return None
    weights = [tensor for module in whole for tensor in (*module.parameters(), *module.buffers())]
    weights, facts = tree_map_only(Tensor, lambda x: (tuple(x.shape), x.stride(), x.dtype, x.device), (weights, facts))
    model = (type(lm.model).__name__, lm.config.to_json_string(), lm.config._attn_implementation, lm.vocab_size, weights)
    modules = [(name, type(part), part.training) for name, part in parts]
    code = _sources(Path(__file__).parents[2])
    facts = (_machine(), torch.get_num_threads(), code, sources, model, modules, epilogue.compile_key, facts)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def load_or_compile(name: str | None, compile_program: Callable[[], Program]) -> tuple[Program, bool]:
    """Return the program called `name` and whether it was on disk; one that was not is put there."""
    if name is None:
        return compile_program(), False
    path = folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # what lies there is run
    except OSError as error:
        logger.warning("compiled units are not kept for later runs: %s", error)
        return compile_program(), False
    # The compiler's own files must not outlive, nor be outlived by, what refers to them.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder() / "kernels"))
    if path.is_file():
        try:
            return Program.from_bytes(path.read_bytes()), True
        except UNREADABLE as error:
            logger.warning("the compiled unit %s cannot be used and is made anew: %s", path, error)
    program = compile_program()
    try:
        if program.is_general:
            temporary = path.with_name(f".{name}.{os.getpid()}")  # others may be compiling the same
            temporary.write_bytes(program.to_bytes())
            os.replace(temporary, path)
    except UNREADABLE as error:
        logger.warning("the compiled unit is not kept for later runs: %s", error)
    return program, False


@cache
def _machine() -> tuple[str, ...]:
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    cpu = (platform.machine(), torch.backends.cpu.get_cpu_capability(), *_cpu_flags())
    return (torch.__version__, transformers.__version__, platform.python_version(), *cpu, *gpus)


def _cpu_flags() -> list[str]:
    """Return what this processor can do: code for one may not run on another that shares the folder."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else [platform.processor()]
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))} or lines[:1])


@cache
def _sources(package: Path) -> str:
    """Return a hash of a package's code, which is part of what was compiled."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _source(kind: type) -> str | None:
    """Return a hash of the file that defines a class, a user's own rule or a model's code; None if there is no such file."""
    if kind.__module__ == "builtins":
        return ""
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return None
