"""Steps on static memory, which compiling and capturing start from.

Everything that changes from call to call is a tensor: where to write, how much memory to read, a stopping rule's state. Prompts
and trees are read by the eager engine's code, into the same memory.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_made_of_tensors
from transformers.cache_utils import Cache

from specheads.decoding.engine.compiled_program import modules_in
from specheads.decoding.engine.eager import (
    CompiledStep,
    EagerEngine,
    Epilogue,
    ForwardOutput,
    RowsEpilogue,
    StepMemory,
    read_rows,
)
from specheads.decoding.engine.reading import RowPlaces, StepLayer, alibi_at, masks_of, reading_tree
from specheads.pair.language_model import LanguageModel

Memory = list[tuple[Tensor, Tensor]]  # keys and values of each layer

# Without a mask these make one of as many places as the text is long, for which the host would wait for the device.
MAKES_MASKS = ("opt", "bloom")  # BLOOM up to transformers 5.20

NUM_SAMPLED = 8  # numbers of each tensor that are compared, too: writing through `.data` changes neither place nor version


class StepKind(NamedTuple):
    """How a step is called; see `Engine.compiled_step`."""

    all_logits: bool = False
    tree: bool = False
    rows: bool = False  # see `Engine.rows_step`


# `run_step` for one compile key and size, a function of tokens, start, places and inputs.
Runner = Callable[[Tensor, Tensor, Tensor, tuple[Any, ...]], Any]


class Weights:
    """What the tensors of some modules held: where each is, how often it was written to, and some of its numbers on a CPU."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        tensors = _tensors_of(modules)
        self._places = [Place(tensor) for tensor in tensors]
        # Views, which see what is written later. On other devices a comparison would wait, and steps read weights in place.
        wide = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.itemsize > 1]
        plain = [each.detach() for each in wide if each.device.type == "cpu" and not is_made_of_tensors(each)]
        self._views = [each.flatten()[:: max(1, each.numel() // NUM_SAMPLED)] for each in plain if each.is_contiguous()]
        self._sample = self._now()

    def are_those_of(self, modules: Sequence[nn.Module]) -> bool:
        """Whether the modules have the same tensors, unchanged."""
        return [Place(tensor) for tensor in _tensors_of(modules)] == self._places and torch.equal(self._now(), self._sample)

    @torch.no_grad()
    def _now(self) -> Tensor:
        """Return the sampled numbers as bytes: NaN equals itself."""
        return torch.cat([torch.zeros(0), *self._views]).view(torch.uint8)


def _tensors_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


class Place:
    """Where a tensor is and how often it was written to."""

    def __init__(self, tensor: Tensor) -> None:
        # The tensor is held, so that no other one can take its place in memory.
        self.tensor = tensor
        self._where: tuple[Any, ...] = tensor.dtype, 0 if tensor.is_inference() else tensor._version
        if is_made_of_tensors(tensor):  # it has no address, and a module that is moved may exchange what it is made of
            self._where += tuple(Place(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        else:
            self._where += (tensor.data_ptr(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.tensor is other.tensor and self._where == other._where

    __hash__ = None  # type: ignore[assignment]


class _StaticLayer(StepLayer):
    """The memory of one text, written at `start` (0-d long)."""

    def __init__(self, keys: Tensor, values: Tensor, start: Tensor, size: int) -> None:
        super().__init__(keys, values, size)
        self.start = start

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write at `start` and return views as far as `size`; positions beyond the text are masked."""
        places = self.start + torch.arange(key_states.shape[2], device=key_states.device)
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return self.keys[:, :, : self.size], self.values[:, :, : self.size]

    def get_seq_length(self) -> Tensor:
        return self.start


def run_step(
    lm: LanguageModel,
    epilogue: Epilogue,
    kind: StepKind,
    memory: Memory,
    tokens: Tensor,
    start: Tensor,
    places: Tensor,
    inputs: tuple[Any, ...],
    chosen: slice | None = None,
) -> Any:
    """Run a forward pass over `tokens` (1, T) at position `start`, or in rows, and then the epilogue.

    It reads as much memory as `places` is long.

    Args:
        chosen: of a step in rows, see RowsLayer.
    """
    size, count = places.shape[0], tokens.shape[1]
    if kind.rows:
        return read_rows(lm, epilogue, memory, tokens, inputs[0], size, inputs[1:], chosen)
    cache = Cache(layers=[_StaticLayer(keys, values, start, size) for keys, values in memory])
    if kind.tree:
        tree_slots, inputs = inputs[0], inputs[1:]
        reading = reading_tree(lm, tree_slots, start, count, size)
    else:
        reading = _reading_chain(lm, start, count, size)
    with reading as arguments:
        hidden = lm.hidden_states(tokens, past_key_values=cache, use_cache=True, **arguments)
    return epilogue(ForwardOutput(tokens, hidden, lm.logits(hidden if kind.all_logits else hidden[:, -1:])), *inputs)


@contextmanager
def _reading_chain(lm: LanguageModel, start: Tensor, count: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which `lm.hidden_states` reads tokens that follow each other; see `reading_tree`."""
    # Padding at the end of the window shares the last position.
    positions = (start + torch.arange(count, device=start.device)).clamp_max(lm.window - 1)[None]
    if lm.config.model_type not in MAKES_MASKS:
        yield {"position_ids": positions}
        return
    key_position = torch.arange(size, device=start.device)
    masks = masks_of(lm, key_position <= positions[..., None], positions[..., None], key_position)
    with alibi_at(lm, key_position):
        yield {"position_ids": positions, "attention_mask": masks}


def rounded_capacity(capacity: int, bucket: int) -> int:
    """Return the positions to allocate for `capacity`.

    A bucket more holds the padding of the last forward passes, and one more is never read. The size of memory is part of what is
    compiled, so there are few sizes: four between a power of two and the next.
    """
    least = capacity + 2 * bucket
    step = max(bucket, 1 << (least.bit_length() - 3))
    return -(-least // step) * step


class StaticEngine(EagerEngine):
    """Steps on static memory, run uncompiled."""

    bucket = 64  # memory is read in multiples of this, so that cost follows the context and loops have no remainder

    def __init__(self, lm: LanguageModel, capacity: int, spare_capacity: int = 0, num_rows: int = 1) -> None:
        whole = rounded_capacity(capacity + spare_capacity, self.bucket)
        super().__init__(lm, capacity, whole - capacity, num_rows)
        self._reach = whole - self.bucket  # the most that a step reads: code compiled for a part may not fit the whole
        self._runners: dict[Hashable, dict[tuple[int, ...], Runner]] = {}  # of each step, by shape
        self._watched: list[tuple[nn.Module, Weights]] = []
        self._watch(lm.model)
        if num_rows == 1:
            self.allocate()
        nothing = torch.zeros(0, device=lm.device)  # for a layer that the model skips
        self._memory = [(layer.keys, layer.values) if layer.is_initialized else (nothing, nothing) for layer in self._layers]
        self._start = torch.zeros((), dtype=torch.long, device=lm.device)
        self._start_number = self._start.numpy() if lm.device.type == "cpu" else None
        self._places = torch.zeros(whole, device=lm.device)
        self._places_to: dict[int, Tensor] = {}  # views: making one takes as long as a small layer
        self.num_prepared = 0  # compilations and captures so far; generation adds none after the warm-up

    def compiled_step(self, epilogue: Epilogue, all_logits: bool = False, tree: bool = False) -> "StaticStep":
        return StaticStep(self, epilogue, StepKind(all_logits, tree))

    def rows_step(self, epilogue: RowsEpilogue) -> "_StaticRowsStep":
        return _StaticRowsStep(self, epilogue, StepKind(all_logits=True, rows=True))

    def warm_up_rows(self, compiled_step: CompiledStep, examples: Sequence[tuple[Any, ...]]) -> None:
        for example in examples:
            compiled_step(*example)
        self.clear()

    def warm_up(self, compiled_step: CompiledStep, counts: Sequence[int], *inputs: Any) -> None:
        warmed_up = set()
        for count in counts:
            for size in self._sizes():
                if self._shape(count, size) in warmed_up or size < count:
                    continue
                warmed_up.add(self._shape(count, size))
                for layer in self._layers:
                    layer.length = size - count
                compiled_step(torch.zeros((1, count), dtype=torch.long, device=self.lm.device), *inputs)
        self.rewind(0)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        # A new text begins, and a model or a head was moved, cast or changed.
        if length == 0 and not all(weights.are_those_of([module]) for module, weights in self._watched):
            self._watched = [(module, Weights([module])) for module, _ in self._watched]
            self._forget()

    def _watch(self, module: nn.Module) -> None:
        """Remember where a module's tensors are: prepared steps may read them there."""
        if all(module is not watched for watched, _ in self._watched):
            self._watched.append((module, Weights([module])))

    def _forget(self) -> None:
        """Drop all prepared steps."""
        for runners in self._runners.values():
            runners.clear()

    def _sizes(self) -> list[int]:
        """Return the sizes of memory that steps are prepared for one by one."""
        return [self._reach]

    def _set_start(self, start: int) -> None:
        """Set the position at which the next step writes."""
        if self._start_number is None:
            self._start.fill_(start)
        else:
            self._start_number[()] = start

    def _places_of(self, size: int) -> Tensor:
        """Return the first `size` places of memory, which a step reads."""
        if size not in self._places_to:
            self._places_to[size] = self._places[:size]
        return self._places_to[size]

    def _size(self, end: int) -> int:
        """Return how much memory a forward pass reads that writes as far as `end`."""
        return -(-end // self.bucket) * self.bucket

    def _shape(self, count: int, size: int) -> tuple[int, ...]:
        """Return the key of the step that serves forward passes over `count` tokens that read `size` positions of memory."""
        return ()

    def _rows_shape(self, count: int, size: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the key of the step in rows that serves such a call."""
        return self._shape(count, size)

    def _prepared(self, step: "StaticStep", shape: tuple[Any, ...], args: tuple[Any, ...]) -> Runner:
        """Return the prepared step for one shape, which is kept and then watched."""
        for module in modules_in(step.epilogue.compile_key):
            if not isinstance(module, StepMemory):
                self._watch(module)
        runner = step.runners[shape] = self._prepare(step.epilogue, step.kind, args)
        self.num_prepared += 1
        return runner

    def _prepare(self, epilogue: Epilogue, kind: StepKind, args: tuple[Any, ...]) -> Runner:
        return self._uncompiled(epilogue, kind)

    def _uncompiled(self, epilogue: Epilogue, kind: StepKind) -> Runner:
        """Return the step as it is."""
        return partial(run_step, self.lm, epilogue, kind, self._memory)


class StaticStep:
    """A step of a StaticEngine; see `Engine.compiled_step`."""

    def __init__(self, engine: StaticEngine, epilogue: Epilogue, kind: StepKind) -> None:
        self.epilogue, self.kind, self._engine = epilogue, kind, engine
        self.runners = engine._runners.setdefault((epilogue.compile_key, kind), {})

    def __call__(self, tokens: Tensor, *inputs: Any) -> Any:
        engine = self._engine
        start, count = engine.length, tokens.shape[1]
        out = self._run(tokens, start, count, start + count, inputs)
        for layer in engine._layers:
            layer.length = start + count
        return out

    def _run(self, tokens: Tensor, start: int, count: int, end: int, inputs: tuple[Any, ...]) -> Any:
        """Run the step over `count` tokens that writes from `start` on, and reads as far as `end`."""
        engine = self._engine
        if end > engine._reach:
            raise RuntimeError(f"{end} positions do not fit into KV memory for {engine._reach}")
        engine._set_start(start)
        size = engine._size(end)
        args = (tokens, engine._start, engine._places_of(size), inputs)
        shape = self._shape(count, size, inputs)
        runner = self.runners.get(shape)
        if runner is None:
            runner = engine._prepared(self, shape, args)
            engine._set_start(start)
        return runner(*args)

    def _shape(self, count: int, size: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the key of the runner that serves a call."""
        return self._engine._shape(count, size)


class _StaticRowsStep(StaticStep):
    """A step of a StaticEngine over tokens of several rows; see `Engine.rows_step`."""

    def _shape(self, count: int, size: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._engine._rows_shape(count, size, inputs)

    def __call__(self, tokens: Tensor, end: int, places: RowPlaces, *inputs: Any) -> Any:
        return self._run(tokens, 0, len(tokens), end, (places, *inputs))
