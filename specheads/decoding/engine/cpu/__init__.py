"""Operations of steps on a CPU, in C++: the compiled engine with `CpuStep`.

The operators of the C++ sources next to this file are `torch.ops.specheads`. The first process of a
machine builds their library, which is kept among the compiler's files, complete or absent, named by
a hash of all that it depends on.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

from specheads.decoding.engine import artefacts
from specheads.decoding.engine.compiled import CompiledEngine, StepOperations
from specheads.decoding.engine.compiled_program import CPU_OPTIONS
from specheads.decoding.engine.cpu.packed import PackedModel, PackedNetwork, is_layer, packed_model
from specheads.decoding.engine.reading import Operations, RowPlaces
from specheads.heads.portable.network import Network
from specheads.pair.language_model import LanguageModel
from specheads.pair.sampling import Sampling, SoftmaxSums
from specheads.progress import waiting

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_MOST_CHARACTERS = 200  # more of a compiler's error is not shown
_C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "AtenTensorHandle*",
    "int": "int64_t",
    "float": "double",
}


# The shapes of results, by operator.
_RESULTS: dict[str, Callable[..., Tensor]] = {
    "packed_linear": lambda x, panels, bias, num_rows, bits: x.new_empty(*x.shape[:-1], num_rows),
    "masked_attention": lambda query, key, value, *others: query.new_empty(
        *query.transpose(1, 2).shape[:3], value.shape[-1]
    ),
    "decoder_layer": lambda hidden, *others: torch.empty_like(hidden),
    "head_network": lambda inputs, *others: inputs.new_empty(inputs.shape[:-1]),
    "kth_largest": lambda x, k: x.new_empty(*x.shape[:-1], 1),
    "kept_softmax": lambda logits, least: torch.empty_like(logits),
    "softmax_sums": lambda logits: logits.new_empty(*logits.shape[:-1], 3),
    "nucleus": lambda probs, top_p: torch.empty_like(probs),
    "most_likely": lambda x: x.new_empty(x.shape[:-1], dtype=torch.long),
    "token_at": lambda probs, uniform: torch.empty_like(uniform, dtype=torch.long),
}


_HANDLES = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
_TENSORS = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
_loaded: list[ctypes.PyDLL] = []  # the library, once it is
_ENTRY = (  # the compiled function in the files of Inductor's C++ wrapper
    "_Z19inductor_entry_implPP16AtenTensorOpaqueS1_"
)


class CpuStep(StepOperations):
    """The operations of one step: packed copies of weights over few tokens, and attention that
    reads rows where they lie.
    """

    def __init__(
        self, lm: LanguageModel, modules: Sequence[nn.Module], few: bool, rows: bool
    ) -> None:
        super().__init__(lm, modules, few, rows)
        self.packed: PackedModel | None = None
        self.has_operators = (few or rows) and _has_kernels(lm) and load_operators()
        if not self.has_operators:
            return
        self.packed = packed_model(lm, modules) if few else None
        self.lm = lm if self.packed is None else self.packed.lm
        self.bind_step = bound_step
        self.reads_all_rows = rows and lm.config._attn_implementation == "sdpa"
        self.compiler_options = {"aot_inductor.custom_ops_to_c_shims": declarations()}
        panels = () if self.packed is None else self.packed.copies.buffers()
        types = sorted({str(each.dtype) for each in panels})
        self.name = ("cpu", self.packed is not None, lm.input_bits, *types)

    @classmethod
    def reader(cls, lm: LanguageModel) -> LanguageModel:
        return packed_reader(lm)

    @classmethod
    def reads_rows_in_place(cls, lm: LanguageModel) -> bool:
        is_sdpa = lm.config._attn_implementation == "sdpa"
        return is_sdpa and _has_kernels(lm) and load_operators()

    def operations(self, places: RowPlaces | None) -> Operations:
        if not self.has_operators:
            return Operations()
        return CpuOperations(
            {} if self.packed is None else self.packed.networks,
            places if self.reads_all_rows else None,
        )


class CpuEngine(CompiledEngine):
    """`engine=compiled` on a CPU."""

    operations = CpuStep


def _has_kernels(lm: LanguageModel) -> bool:
    """Whether the operators compute in the type of a model; torch runs those of other types."""
    return lm.output_embedding.weight.dtype in (torch.float32, torch.bfloat16)


def packed_reader(lm: LanguageModel) -> LanguageModel:
    """Return a model that reads on packed copies, as steps do, if all its layers have them and
    products gain by them.
    """
    # 16 bits gain nothing
    is_right = lm.device.type == "cpu" and lm.output_embedding.weight.dtype == torch.float32
    has_layers = sum(map(is_layer, lm.model.modules())) == lm.config.num_hidden_layers
    if (
        not is_right
        or lm.config._attn_implementation != "sdpa"
        or not has_layers
        or not load_operators()
    ):
        return lm
    if (packed := packed_model(lm, ())) is None:
        return lm
    packed.lm.explicit_masks = True
    return packed.lm


class CpuOperations(Operations):
    """What C++ computes of a forward pass, a warp and a head, on packed copies by network.

    `places` are those of the tokens, where keys and values are those of all rows of a memory;
    `in_bulk`: whether many distributions are warped at once, uncompiled.
    """

    def __init__(
        self,
        networks: Mapping[nn.Module, PackedNetwork] | None = None,
        places: RowPlaces | None = None,
        in_bulk: bool = False,
    ) -> None:
        self._networks = networks or {}
        self.places = places
        self._in_bulk = in_bulk

    def linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        copied: Any = self._networks.get(module)
        return super().linear(module, x) if copied is None else copied.compute(0, 32, module, x)

    def most_likely(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return super().most_likely(x)
        return torch.ops.specheads.most_likely(x)

    def kth_largest(self, x: Tensor, k: int) -> Tensor:
        if x.dtype != torch.float32:
            return super().kth_largest(x, k)
        return torch.ops.specheads.kth_largest(x, k)

    def token_at(self, probs: Tensor, uniform: Tensor) -> Tensor:
        if probs.dtype != torch.float32:
            return super().token_at(probs, uniform)
        return torch.ops.specheads.token_at(probs, uniform)

    def _may_round(self, x: Tensor) -> bool:
        # Compiled code rounds sums in another order anyway; what runs uncompiled keeps its bits.
        return x.dtype == torch.float32 and (self._in_bulk or torch.compiler.is_compiling())

    def kept_softmax(self, logits: Tensor, least: Tensor) -> Tensor:
        if not self._may_round(logits):
            return super().kept_softmax(logits, least)
        return torch.ops.specheads.kept_softmax(logits, least)

    def nucleus(self, probs: Tensor, top_p: float) -> Tensor:
        if not self._may_round(probs):
            return super().nucleus(probs, top_p)
        return torch.ops.specheads.nucleus(probs, top_p)

    def softmax_sums(self, logits: Tensor) -> SoftmaxSums:
        if not self._may_round(logits):
            return super().softmax_sums(logits)
        return SoftmaxSums(*torch.ops.specheads.softmax_sums(logits).unbind(-1))

    def head_logits(self, network: Network, inputs: Tensor) -> Tensor:
        copied = self._networks.get(network)
        return super().head_logits(network, inputs) if copied is None else copied.logits(inputs)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
    ) -> Tensor | None:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        of_rows = self.places or (None, None)
        return torch.ops.specheads.masked_attention(query, key, value, mask, *of_rows, scale)


def bulk_operations(device: torch.device) -> Sampling:
    """Return what to compute with where a device warps many distributions at once, uncompiled."""
    return CpuOperations(in_bulk=True) if device.type == "cpu" and load_operators() else Sampling()


@cache
def load_operators() -> bool:
    """Build or load the operators; return whether they can be used, and say why not."""
    with artefacts.COMPILING:
        if not _loaded:  # by another thread
            _load_or_warn()
    return bool(_loaded)


def _load_or_warn() -> None:
    try:
        path = _library_path()
        if not path.exists():
            logger.info(
                "building the operators in C++, once for this machine; it takes about a minute"
            )
        try:
            with waiting("building the operators in C++, once per machine"):
                library = _load_library(path)
        except OSError:  # it is no library to its end
            if not artefacts.remove_broken_libraries():
                raise
            library = _load_library(path)
        library = _declare(library)
    except (RuntimeError, OSError, AssertionError) as error:
        reason = next(iter(str(error).splitlines()), "")
        logger.warning(
            "verification is slower than it could be, because its operators cannot be built: %s",
            reason,
        )
        return
    for name, result in _RESULTS.items():
        torch.library.register_fake(f"specheads::{name}", result)
    _loaded.append(library)


class _Declarations(dict[str, list[str]]):
    """The compiler looks for operators, which cannot be kept on disk.

    Here they stand under their names.
    """

    def __contains__(self, operator: object) -> bool:
        return super().__contains__(str(operator))


def declarations() -> dict[str, list[str]]:
    """Return one of the compiler's options: pointers to C functions, as looking operators up by
    their names takes longer.
    """
    declared = _Declarations()
    for name in _RESULTS:
        operator = getattr(torch.ops.specheads, name).default
        arguments = [
            f"{_C_TYPES[str(each.type)]} {each.name}" for each in operator._schema.arguments
        ]
        declared[str(operator)] = [
            (
                f"AOTITorchError (*aoti_torch_cpu_{name})({', '.join(arguments)}, AtenTensorHandle*"
                " result)"
            )
        ]
    return declared


def _library_path() -> Path:
    """Return where the library is or will be, named by its sources, the compiler's options and this
    machine.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes seconds to import

    artefacts.keep_kernels_private()
    texts = [
        (path.name, path.read_text())
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in (".cpp", ".h")
    ]
    digest = hashlib.sha256(
        repr((texts, _command("folder"), artefacts.machine())).encode()
    ).hexdigest()
    return Path(cache_dir(), f"operators-{digest[:24]}.so")


def _load_library(path: Path) -> ctypes.PyDLL:
    """Return the library, built if it is not there.

    Its symbols are visible to compiled steps, and its functions are called with Python's lock held.
    """
    _build(path)
    return ctypes.PyDLL(str(path), ctypes.RTLD_GLOBAL)


def _declare(library: ctypes.PyDLL) -> ctypes.PyDLL:
    """Return the library with the types of the functions in operators.cpp."""
    library.specheads_bind.restype = ctypes.c_void_p
    library.specheads_bind.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_int64]
    library.specheads_unbind.argtypes = [ctypes.c_void_p]
    library.specheads_unbind.restype = None
    library.specheads_run.restype = ctypes.py_object
    library.specheads_run.argtypes = [ctypes.c_void_p, ctypes.py_object]
    library.specheads_repeat.restype = ctypes.py_object
    numbers = [ctypes.c_int64] * 5
    library.specheads_repeat.argtypes = [ctypes.c_void_p, ctypes.py_object, *numbers]
    return library


class BoundStep:
    """A compiled step with some of its tensors bound, which C++ runs, also several times in a
    row.
    """

    def __init__(
        self, entry: ctypes.c_void_p, tensors: Sequence[Tensor | None], num_results: int
    ) -> None:
        (library,) = _loaded
        stay = iter(_HANDLES([tensor for tensor in tensors if tensor is not None]))
        self._bound = library.specheads_bind(
            entry, [None if each is None else next(stay) for each in tensors], num_results
        )
        self._run = library.specheads_run
        self._repeat = library.specheads_repeat
        weakref.finalize(self, library.specheads_unbind, self._bound)

    def __call__(self, given: list[Tensor]) -> list[Tensor]:
        """Return the results for the tensors that are not bound."""
        results: list[Tensor] = _TENSORS(self._run(self._bound, _HANDLES(given)))
        return results

    def repeat(self, given: list[Tensor], *numbers: int) -> tuple[int, list[Tensor]]:
        """Return how often the step ran, and its last results; see `specheads_repeat`."""
        count, results = self._repeat(self._bound, _HANDLES(given), *numbers)
        return count, _TENSORS(results)


def bound_step(
    compiled: Callable[..., Any], tensors: Sequence[Tensor | None], num_results: int
) -> BoundStep | None:
    """Return compiled code that C++ runs with the `tensors` bound that are not None.

    None where the code has another form than that of Inductor's C++ wrapper: a Python function
    around the entry of a shared library.
    """
    held = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    files = [getattr(getattr(each, "__self__", None), "__file__", None) for each in held]
    if len(files) != 1 or files[0] is None or not _loaded:
        return None
    try:
        entry = ctypes.cast(getattr(ctypes.PyDLL(files[0]), _ENTRY), ctypes.c_void_p)
    except (OSError, AttributeError):
        return None
    return BoundStep(entry, tensors, num_results)


def _build(path: Path) -> None:
    """Build the library if it is not there.

    Of processes that want to, one builds and the others wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.exists():
            return
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="operators-") as folder:
            words = shlex.split(_command(folder))
            with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as compiler:
                with suppress(Exception):  # a step that is compiled says why
                    artefacts.load_compiler()  # meanwhile, as steps need it next
                said = compiler.communicate()[1]
            if compiler.returncode:
                errors = [line for line in said.splitlines() if "error" in line]
                reason = errors[0] if errors else f"the compiler ended with {compiler.returncode}"
                raise RuntimeError(reason[-_MOST_CHARACTERS:])
            os.replace(Path(folder, "operators.so"), path)


def _command(folder: str) -> str:
    """Return the command that builds the library in a folder, with the options by which steps are
    compiled.
    """
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    source = str(_FOLDER / "operators.cpp")
    with config.patch(CPU_OPTIONS):
        options = CppTorchDeviceOptions(device_type="cpu", vec_isa=pick_vec_isa())
        return CppBuilder(
            name="operators", sources=source, BuildOption=options, output_dir=folder
        ).get_command_line()
