"""Compiled units on disk, so that a unit is compiled once per machine and loaded in every run after that.

They lie in `$SPECHEADS_CACHE/compiled` (default `~/.cache/specheads`), one file per unit, named by a hash of all that they depend
on. The folder may be removed at any time. The files are code: load none that somebody else has written.
"""

import hashlib
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

from specheads.pair import LanguageModel

logger = logging.getLogger(__name__)


# What a damaged or outdated file raises; compiling anew puts it right.
UNREADABLE = (pickle.UnpicklingError, EOFError, OSError, ImportError, AttributeError, LookupError, ValueError, TypeError)
UNREADABLE += (RuntimeError, AssertionError)


def folder() -> Path:
    """Return where compiled units are kept."""
    return Path(os.environ.get("SPECHEADS_CACHE") or Path.home() / ".cache" / "specheads") / "compiled"


def name_of(lm: LanguageModel, *facts: Any) -> str:
    """Return what tells apart the compiled code of `facts` (names, numbers and example tensors) for this model and machine."""
    weights = [*lm.model.parameters(), *lm.model.buffers()]
    weights, facts = tree_map_only(Tensor, lambda x: (tuple(x.shape), x.stride(), x.dtype, x.device), (weights, facts))
    model = (type(lm.model).__name__, lm.config.to_json_string(), lm.config._attn_implementation, lm.vocab_size, weights)
    return hashlib.sha256(repr((_machine(), _sources(), torch.get_num_threads(), model, facts)).encode()).hexdigest()[:24]


def load_or_compile(name: str, compile_unit: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the compiled unit called `name` and whether it was on disk; one that was not is put there."""
    path = folder() / name
    # The compiler's own files must not outlive, nor be outlived by, what refers to them.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder() / "kernels"))
    if path.is_file():
        try:
            with path.open("rb") as file:
                return torch.compiler.load_compiled_function(file, f_globals={"torch": torch}), True
        except UNREADABLE as error:
            logger.warning("the compiled unit %s cannot be used and is made anew: %s", path, error)
    compiled = compile_unit()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        compiled.save_compiled_function(str(path))  # appears by rename
    except OSError as error:
        logger.warning("the compiled unit is not kept for later runs: %s", error)
    return compiled, False


@cache
def _machine() -> tuple[str, ...]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    cpu = (platform.machine(), torch.backends.cpu.get_cpu_capability(), platform.python_version())
    return (torch.__version__, transformers.__version__, *cpu, gpu)


@cache
def _sources() -> str:
    """Return a hash of this package's code, which is part of what was compiled."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
