"""A step as one compiled function of a flat list of tensors, which can be kept on disk, without
weights.

torch.export traces forward pass and epilogue once, with sizes left open; Inductor compiles the
trace. A call then needs no look-ups: weights and memory are bound beforehand, and the call's
tensors are appended.
"""

import hashlib
import pickle
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_made_of_tensors
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.standalone_compile import AOTCompiledArtifact

# Inductor's options. A step is only called with the shapes it was compiled for
# (tests/decoding/test_engines.py); checking would cost as much as a layer.
OPTIONS = {
    "size_asserts": False,
    "alignment_asserts": False,
    "cpp.enable_floating_point_contract_flag": "fast",
}
# On a CPU a step calls its kernels from C++, and what several layers read (rotations, masks) is
# computed once.
CPU_OPTIONS = {
    **OPTIONS,
    "cpp_wrapper": True,
    # Inductor compiles a program for each kind of vector instructions, three seconds each, in case
    # that the compiler does not know it; those that compile torch's headers do.
    "cpp.vec_isa_ok": True,
    "realize_reads_threshold": 0,
    "cpp.min_chunk_size": 16384,
}

_HEADERS = Path(__file__).parent / "cpu" / "steps.h"

TensorTree = Any  # a tensor, or a tuple of such trees

# Numbers; a larger tensor that no module owns may be a weight, which must not be kept on disk
_LARGEST_CONSTANT = 64
# Numbers of each tensor that are compared at each new text: writing through `.data` changes neither
# place nor version. All are compared when an engine is made or warmed up.
_NUM_SAMPLED = 8
_WORDS = 1024  # of a row of a digest's table

_Build = Callable[[Iterator[Tensor]], TensorTree]


class BoundStep(Protocol):
    """A compiled step with some of its tensors bound."""

    def __call__(self, given: list[Tensor], /) -> list[Tensor]:
        """Return the results for the tensors that are not bound."""

    def repeat(self, given: list[Tensor], /, *numbers: int) -> tuple[int, list[Tensor]]:
        """Run it until its first result is true; see `specheads_repeat` in operators.cpp."""


# Makes one of a compiled function, its tensors with None for those that each call brings, and the
# number of its results; None where it cannot.
BindStep = Callable[[Callable[..., object], Sequence[Tensor | None], int], BoundStep | None]


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled step, and the sources of the tensors that it reads."""

    # The function of the tensors of `sources`, then the tensors of a call
    artifact: "AOTCompiledArtifact"
    options: Mapping[str, object]  # Inductor's
    sources: Sequence[str | Tensor]  # names of a module's tensors, and tensors that no module owns
    outputs: TensorTree  # the structure of the result, with None in place of tensors

    @classmethod
    def compile(
        cls,
        module: nn.Module,
        args: tuple[TensorTree, ...],
        open_sizes: Mapping[int, int],
        options: Mapping[str, object],
        open_inputs: Sequence[tuple[int, ...]] = (),
    ) -> "CompiledProgram":
        """Compile a call of `module` with example tensors, in tuples and lists.

        Raises exceptions of many kinds if it cannot.

        Args:
            open_sizes: by i, the dimension of the tensor `args[i]` whose size may change from call
                to call.
            options: Inductor's.
            open_inputs: the dimensions whose sizes may change of the first entries of the last
                argument.
        """
        shapes = list(tree_map(lambda leaf: None, args))
        for i, dimension in open_sizes.items():
            shapes[i] = {dimension: Dim.DYNAMIC}
        opened = []
        for i, dimensions in enumerate(open_inputs):
            shape = dict.fromkeys(dimensions, Dim.DYNAMIC)
            opened.append(tree_map(lambda leaf, shape=shape: shape, args[-1][i]))
        shapes[-1] = (*opened, *shapes[-1][len(opened) :]) if opened else shapes[-1]
        with torch.no_grad():
            exported = torch.export.export(module, args, dynamic_shapes=tuple(shapes), strict=False)
            _drop_checks(exported.graph_module)
            sources = _sources(exported, module)
            placeholders = [node.meta["val"] for node in _placeholders(exported)]
            _precompile_all_headers()
            artifact = torch._inductor.standalone_compile(
                exported.graph_module,
                placeholders,
                dynamic_shapes="from_graph",
                options={"config_patches": dict(options)},
                aot=True,
            )
        spec = exported.call_spec.out_spec
        artifact = cast("AOTCompiledArtifact", artifact)  # which `aot` asks for
        return cls(artifact, options, sources, tree_unflatten([None] * spec.num_leaves, spec))

    @property
    def is_general(self) -> bool:
        """Whether it contains no tensor that may change from run to run, so that it can be kept on
        disk.
        """
        for source in self.sources:
            if not isinstance(source, Tensor):
                continue
            if source.numel() > _LARGEST_CONSTANT or source.requires_grad:
                return False
        return True

    def bind(
        self,
        module: nn.Module,
        memory: Sequence[TensorTree],
        bind_step: BindStep | None = None,
    ) -> "BoundProgram":
        """Return the call of `module`; see BoundProgram."""
        return BoundProgram(self, module, memory, bind_step)

    def to_bytes(self) -> bytes:
        """Return the program as bytes, for `from_bytes`."""
        return pickle.dumps((self.artifact.serialize(), self.options, self.sources, self.outputs))

    @classmethod
    def from_bytes(cls, content: bytes) -> "CompiledProgram":
        """Return the program of `to_bytes`, running code in it.

        Raises exceptions of many kinds for other bytes.
        """
        from torch._inductor import config  # takes seconds to import
        from torch._inductor.standalone_compile import AOTCompiledArtifact

        artifact, options, *rest = pickle.loads(content)
        # Loading looks kernels up by their source and options, and builds those that are missing.
        with config.patch(options):
            return cls(AOTCompiledArtifact.deserialize(artifact), options, *rest)


class BoundProgram:
    """A compiled step as a function of `(tokens, start, places, inputs)`, tensors and tuples of
    them; see StepModule.
    """

    def __init__(
        self,
        program: CompiledProgram,
        module: nn.Module,
        memory: Sequence[TensorTree],
        bind_step: BindStep | None,
    ) -> None:
        tensors = _tensors(module)
        self._memory = tree_leaves(memory)
        self._bind_step = bind_step
        self._weights = [
            tensors[source] if isinstance(source, str) else source for source in program.sources
        ]
        self._artifact = program.artifact
        self._build = _builder(program.outputs)
        self._run: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
        self.bound: BoundStep | None = None

    def __call__(
        self, tokens: Tensor, start: Tensor, places: Tensor, inputs: tuple[TensorTree, ...]
    ) -> TensorTree:
        given = add_leaves(inputs, [tokens, start, places])
        if self.bound is not None:
            return self._build(iter(self.bound(given)))
        args = [*self._weights, *given[:3], *self._memory, *given[3:]]
        if self._run is not None:
            return self._build(iter(self._run(args)))
        results, self._run = _first_call(self._artifact, args)
        if self._bind_step is not None:
            others = [None] * (len(given) - 3)
            tensors = [*self._weights, None, None, None, *self._memory, *others]
            self.bound = self._bind_step(self._run, tensors, len(results))
        return self._build(iter(results))

    def repeat(
        self, given: list[Tensor], num_columns: int, start: int, bucket: int, least: int, most: int
    ) -> tuple[int, TensorTree]:
        """Run a step over one token after another until its first output is true.

        Return how often, and the last result.

        The arguments are those of `specheads_repeat` in operators.cpp; `bucket`: memory is read in
        multiples of it.
        """
        assert self.bound is not None
        count, results = self.bound.repeat(given, num_columns, start, bucket, least, most)
        return count, self._build(iter(results))


def modules_in(compile_key: Hashable) -> list[nn.Module]:
    """Return the modules in a compile key."""
    return [leaf for leaf in tree_leaves(compile_key) if isinstance(leaf, nn.Module)]


# What each tensor on a CPU held when `read_weights` read it last
_digests: MutableMapping[Tensor, bytes] = WeakTensorKeyDictionary()


def read_weights(module: nn.Module) -> None:
    """Note every number that a module's tensors hold on a CPU; what was prepared for other numbers
    is prepared again at the next text.
    """
    for tensor in _parts_of([module]):
        if _is_compared(tensor):
            _digests[tensor] = _digest(tensor)


def _is_compared(tensor: Tensor) -> bool:
    """Whether a tensor's numbers are compared: not on other devices, where a comparison would wait
    and steps read weights in place.
    """
    is_wide = tensor.is_floating_point() and tensor.itemsize > 1
    return is_wide and tensor.device.type == "cpu" and not is_made_of_tensors(tensor)


def _digest(tensor: Tensor) -> bytes:
    """Return a hash of all numbers of a tensor on a CPU: of the exclusive ors of the rows and of
    the columns of a table of its bits, which takes as long as reading them.
    """
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    whole = len(content) // (8 * _WORDS) * 8 * _WORDS
    table = content[:whole].view(np.uint64).reshape(-1, _WORDS)
    found = hashlib.blake2b(content[whole:].tobytes())
    for axis in (0, 1):
        found.update(np.bitwise_xor.reduce(table, axis=axis).tobytes())
    return found.digest()


class Weights:
    """What the tensors of some modules held: where each is, how often it was written to, and its
    numbers on a CPU.
    """

    def __init__(self, *modules: nn.Module) -> None:
        # Held, so that no other one can take the place of one in memory
        self._tensors = _parts_of(modules)
        self._places = [_place_of(tensor) for tensor in self._tensors]
        self._read = [_digests.get(tensor) for tensor in self._tensors]
        # Views, which see what is written later
        self._views = list[Tensor]()
        for tensor in self._tensors:
            plain = tensor.detach()
            if _is_compared(tensor) and plain.is_contiguous():
                step = max(1, plain.numel() // _NUM_SAMPLED)
                self._views.append(plain.flatten()[::step])
        self._sample = self._now()

    def are_those_of(self, *modules: nn.Module) -> bool:
        """Whether the modules have the same tensors, unchanged."""
        places = [_place_of(tensor) for tensor in _parts_of(modules)]
        if places != self._places or not torch.equal(self._now(), self._sample):
            return False
        for tensor, known in zip(self._tensors, self._read, strict=True):
            if known is not None and known != _digests.get(tensor):
                return False
        return True

    @torch.no_grad()
    def _now(self) -> Tensor:
        """Return the sampled numbers as bytes: NaN equals itself."""
        return torch.cat([torch.zeros(0), *self._views]).view(torch.uint8)


def _parts_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors of modules, and those that some are made of, as quantized ones are."""
    tensors = list[Tensor]()
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    for tensor in tensors:  # the list grows meanwhile
        if is_made_of_tensors(tensor):
            names, _ = tensor.__tensor_flatten__()
            tensors.extend(getattr(tensor, name) for name in names)
    return tensors


def _place_of(tensor: Tensor) -> tuple[object, ...]:
    """Return which tensor it is, where its numbers are, and how often it was written to."""
    address = None if is_made_of_tensors(tensor) else tensor.data_ptr()
    return id(tensor), tensor.dtype, address, 0 if tensor.is_inference() else tensor._version


@cache
def _precompile_all_headers() -> None:
    """Have Inductor precompile the headers of a CPU's kernels along with that of their wrapper.

    Only the latter is precompiled otherwise, and the others take a third of g++'s time.
    """
    from torch._inductor import codecache

    wrappers: Any = codecache.CppWrapperCodeCache
    default = getattr(wrappers, "_get_uncompiled_header", None)
    if default is not None:  # it is not part of torch's interface
        wrappers._get_uncompiled_header = lambda device: (
            str(_HEADERS) if device == "cpu" else default(device)
        )


def _drop_checks(traced: GraphModule) -> None:
    """Remove assertions and their inputs from a trace: some wait for the device."""
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.target.__name__.startswith(
            ("_assert", "sym_constrain")
        ):
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module under all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _placeholders(exported: ExportedProgram) -> list[Node]:
    """Return the nodes of a trace that stand for the tensors it takes."""
    return [node for node in exported.graph.nodes if node.op == "placeholder"]


def _sources(exported: ExportedProgram, module: nn.Module) -> list[str | Tensor]:
    """Return the names of the module's tensors, and the other tensors, that a traced call reads.

    Drop its other such inputs.
    """
    tensors = _tensors(module)
    sources = list[str | Tensor]()
    specs = exported.graph_signature.input_specs
    first = [spec.kind for spec in specs].index(InputKind.USER_INPUT)
    if any(spec.kind is not InputKind.USER_INPUT for spec in specs[first:]):
        raise RuntimeError("a trace's weights come after its inputs")
    placeholders = _placeholders(exported)
    for node, spec in zip(placeholders[:first], specs[:first], strict=True):
        name = str(spec.target)
        if not node.users:
            exported.graph.erase_node(node)
        else:
            sources.append(name if name in tensors else exported.constants[name])
    exported.graph_module.recompile()
    return sources


def add_leaves(tree: TensorTree, leaves: list[Tensor]) -> list[Tensor]:
    """Append the tensors in tuples, as `tree_leaves` returns them, in a tenth of the time.

    Return the list.
    """
    if isinstance(tree, tuple):
        for part in tree:
            add_leaves(part, leaves)
    else:
        leaves.append(tree)
    return leaves


def _first_call(
    artifact: Callable[..., Sequence[Tensor]], args: list[Tensor]
) -> tuple[Sequence[Tensor], Callable[[list[Tensor]], Sequence[Tensor]]]:
    """Run an artifact.

    Return its results, and the function of a list of tensors to be called from now on.

    That is the compiled code itself where the artifact only passes its results on, which a second
    call shows: a step may run twice, as it writes the same into its memory. The wrappers around the
    code check what cannot change here, and take a sixth of the time of a small draft's step.
    """
    graphs = _graphs_in(artifact, set())
    given = list(args)  # compiled code empties its list
    results = artifact(*args)
    compiled = graphs[0].current_callable if len(graphs) == 1 else None
    if compiled is not None:
        again = compiled(given)
        if len(again) == len(results) and all(map(_is_equal, again, results)):
            return results, compiled
    return results, lambda tensors: artifact(*tensors)


def _is_equal(first: object, second: object) -> bool:
    """Whether two results are tensors of the same bytes."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    return _form_of(first) == _form_of(second) and torch.allclose(
        first, second, rtol=0, atol=0, equal_nan=True
    )


def _graphs_in(function: object, seen: set[int]) -> "list[CompiledFxGraph]":
    """Return the compiled graphs that a function calls, through the functions and objects that it
    holds.
    """
    from torch._inductor.output_code import CompiledFxGraph  # takes seconds to import

    if isinstance(function, CompiledFxGraph):
        return [function]
    if id(function) in seen or not callable(function) or isinstance(function, type | nn.Module):
        return []
    seen.add(id(function))
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    attributes = getattr(function, "__dict__", {})
    held += [attributes[name] for name in attributes if name in ("compiled_fn", "inner_fn")]
    graphs = []
    for each in held:
        graphs += _graphs_in(each, seen)
    return graphs


def is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors show the same memory in the same way."""
    return _form_of(first) == _form_of(second) and first.data_ptr() == second.data_ptr()


def _form_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _builder(tree: TensorTree) -> _Build:
    """Return the function that builds a tree like this from its leaves."""
    if not isinstance(tree, tuple):
        if tree is not None:
            raise TypeError(
                f"an epilogue returns a {type(tree).__name__}; expected tensors and tuples of them"
            )
        return next
    parts = [_builder(part) for part in tree]
    kind = type(tree)
    if hasattr(tree, "_fields"):
        return lambda leaves: kind(*[part(leaves) for part in parts])
    return lambda leaves: tuple([part(leaves) for part in parts])
