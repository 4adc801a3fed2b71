"""Steps compiled by Inductor, for few numbers of tokens; see `CompiledEngine._width`.

Everything that changes from call to call is a tensor: where to write, how much memory to read, a
stopping rule's state. Prompts and trees are read by the eager engine's code, into the same memory.
"""

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from specheads.decoding.engine import artefacts
from specheads.decoding.engine.artefacts import Job, load_or_compile, name_of
from specheads.decoding.engine.compiled_program import (
    CPU_OPTIONS,
    OPTIONS,
    BindStep,
    BoundProgram,
    CompiledProgram,
    TensorTree,
    Weights,
    add_leaves,
    modules_in,
    read_weights,
)
from specheads.decoding.engine.eager import (
    CompiledStep,
    EagerEngine,
    Epilogue,
    ForwardOutput,
    StepMemory,
    text_places,
)
from specheads.decoding.engine.reading import (
    ChainLayer,
    Memory,
    Operations,
    RowPlaces,
    chain_reading,
    computing,
    rows_states,
    states_and_inputs,
)
from specheads.errors import UserError
from specheads.pair.language_model import LanguageModel
from specheads.progress import waiting

logger = logging.getLogger(__name__)

# The most that count as a few: with more, BLAS on the model's weights is about as fast as
# packed copies
MOST_TOKENS = 64
_WIDTHS = ("one token", "a few tokens", "many tokens", "two tokens")
# Example tokens for "a few": sizes of 1, and those next to them, would be compiled as constants
_FEW = 5

# It takes tokens, start, places and inputs; see StepModule
Runner = Callable[[Tensor, Tensor, Tensor, tuple[TensorTree, ...]], TensorTree]


class StepKind(NamedTuple):
    """How a step is called; see `Engine.compiled_step` and `Engine.rows_step`."""

    all_logits: bool = False
    rows: bool = False
    layers: tuple[int, ...] = ()  # those whose inputs the epilogue gets


class Step(NamedTuple):
    """A forward pass and its epilogue, and what runs them by shape."""

    epilogue: Epilogue
    kind: StepKind
    runners: dict[tuple[Hashable, ...], Runner]


class StepOperations(nn.Module):
    """What one step computes with: here torch.

    It owns the tensors that it reads in place of the model's and the epilogue's.

    `modules` are the epilogue's; `few`: whether a step over one token or a few is prepared; `rows`:
    whether it reads rows.
    """

    compiler_options: Mapping[str, object] = {}
    reads_all_rows = (
        False  # a step in rows gives attention the memory of all rows, not a copy for each token
    )
    name: Hashable = "torch"  # compiled code depends on it
    # What binds tensors to compiled steps; None: each call passes all of them
    bind_step: BindStep | None = None

    def __init__(
        self, lm: LanguageModel, modules: Sequence[nn.Module], few: bool, rows: bool
    ) -> None:
        super().__init__()
        self.lm = lm  # computes as the step should

    @classmethod
    def reader(cls, lm: LanguageModel) -> LanguageModel:
        """Return a model that reads as `lm` does, uncompiled: on packed copies of its weights,
        where there are any.
        """
        return lm

    @classmethod
    def reads_rows_in_place(cls, lm: LanguageModel) -> bool:
        """Whether attention reads rows where they lie.

        Copies would cost more than one prompt after another.
        """
        return False

    def operations(self, places: RowPlaces | None) -> Operations:
        """Return what a forward pass and the epilogue compute with.

        `places` of the tokens of a step in rows.
        """
        return Operations()


class StepModule(nn.Module):
    """A forward pass on static memory and the epilogue after it, as a module that owns the weights
    it reads.
    """

    def __init__(self, operations: StepOperations, epilogue: Epilogue, kind: StepKind) -> None:
        super().__init__()
        self.model = operations.lm.model
        self.others = nn.ModuleList(modules_in(epilogue.compile_key))
        # A tuple: weights have no other names by the epilogue
        self.operations = operations
        self.step = (epilogue, kind)

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        places: Tensor,
        memory: Memory,
        inputs: tuple[TensorTree, ...],
    ) -> TensorTree:
        """Read `tokens` (1, T) at position `start`, or (N, 1) in rows, and as much memory as
        `places` is long.
        """
        lm = self.operations.lm
        (epilogue, kind) = self.step
        size = places.shape[0]
        count = tokens.shape[1]
        places_of_rows, others = (inputs[0], inputs[1:]) if kind.rows else (None, inputs)

        def read() -> Tensor:
            if places_of_rows is not None:
                chosen = slice(None) if self.operations.reads_all_rows else None
                return rows_states(lm, memory, tokens, places_of_rows, size, chosen)
            cache = Cache(layers=[ChainLayer(keys, values, size, start) for keys, values in memory])
            return chain_reading(lm, start, count, size).hidden_states(lm, tokens, cache)

        with computing(self.operations.operations(places_of_rows)):
            hidden, of_layers = states_and_inputs(lm, kind.layers, read)
            logits = lm.kept_logits(hidden if kind.all_logits or kind.rows else hidden[:, -1:])
            written = places_of_rows
            if kind.layers and written is None:
                written = text_places(0, start + torch.arange(count, device=start.device)[None])
            output = ForwardOutput(tokens, hidden, logits, of_layers, written, lm)
            return epilogue(output, *others)


def _rounded_capacity(capacity: int, bucket: int) -> int:
    """Return the positions to allocate for `capacity`.

    A bucket more holds the padding of the last forward passes, and one more is never read. The size
    of memory is part of what is compiled, so there are few sizes: four between a power of two and
    the next.
    """
    least = capacity + 2 * bucket
    step = max(bucket, 1 << (least.bit_length() - 3))
    return -(-least // step) * step


class CompiledEngine(EagerEngine):
    """`engine=compiled`: steps on static memory.

    What cannot be compiled is a UserError if `strict`, or else runs uncompiled.
    """

    # Memory is read in multiples of this, so that cost follows the context and loops have no
    # remainder
    bucket = 64
    example_buckets = 1  # that a step reads while it is traced
    operations: type[StepOperations] = StepOperations
    _compiled: dict[Hashable, Runner]
    _reader: LanguageModel | None  # the model as it reads prompts

    def __init__(
        self,
        lm: LanguageModel,
        capacity: int,
        spare_capacity: int = 0,
        num_rows: int = 1,
        layers: Sequence[int] = (),
        strict: bool = True,
    ) -> None:
        whole = _rounded_capacity(capacity + spare_capacity, self.bucket)
        super().__init__(lm, capacity, whole - capacity, num_rows, layers)
        # The most that a step reads: code compiled for a part may not fit the whole
        self._reach = whole - self.bucket
        self.strict = strict
        self._steps: dict[Hashable, Step] = {}
        self._step_of: dict[CompiledStep, Step] = {}  # by the function that runs it
        # Prepared steps may read weights where they are
        read_weights(lm.model)
        self._watched = {lm.model: Weights(lm.model)}
        if num_rows == 1:
            self._allocate()
        self._memory = self._keys_and_values()
        self._start = torch.zeros((), dtype=torch.long, device=lm.device)
        self._start_number = self._start.numpy() if lm.device.type == "cpu" else None
        self._places = torch.zeros(whole, device=lm.device)
        self._places_to: dict[int, Tensor] = {}  # views: making one takes as long as a small layer
        self.num_prepared = 0
        self._forget()

    def compiled_step(self, epilogue: Epilogue, all_logits: bool = False) -> CompiledStep:
        step = self._step(epilogue, StepKind(all_logits, layers=self.layers))

        def run(tokens: Tensor, *inputs: TensorTree) -> TensorTree:
            start = self.length
            end = start + tokens.shape[1]
            out = self._run(step, tokens, start, end, inputs)
            self.pretend(end)
            return out

        self._step_of[run] = step
        return run

    def _step(self, epilogue: Epilogue, kind: StepKind) -> Step:
        return self._steps.setdefault((epilogue.compile_key, kind), Step(epilogue, kind, {}))

    def repeat(
        self,
        step: CompiledStep,
        tokens: Tensor,
        columns: Sequence[Tensor],
        *inputs: TensorTree,
        least: int = 1,
    ) -> tuple[int, TensorTree]:
        runner = self._step_of[step].runners.get(self._shape(1, self.bucket, StepKind()))
        if not isinstance(runner, BoundProgram) or runner.bound is None:
            return super().repeat(step, tokens, columns, *inputs, least=least)
        start = self.length
        self._check_fits(start + 1)
        most = min(tokens.shape[1], self._reach - start)
        given = add_leaves(inputs, [tokens, self._start, self._places, *columns])
        count, out = runner.repeat(given, len(columns), start, self.bucket, least, most)
        self.pretend(start + count)
        return count, out

    @property
    def reader(self) -> LanguageModel:
        if self._reader is None:
            self._reader = self.operations.reader(self.lm)
        return self._reader

    def rows_step(self, epilogue: Epilogue) -> CompiledStep:
        step = self._step(epilogue, StepKind(all_logits=True, rows=True, layers=self.layers))

        def run(tokens: Tensor, end: int, *inputs: TensorTree) -> TensorTree:
            return self._run(step, tokens, 0, end, inputs)

        return run

    def _run(
        self, step: Step, tokens: Tensor, start: int, end: int, inputs: tuple[TensorTree, ...]
    ) -> TensorTree:
        """Run a step that writes from `start` on, and reads as far as `end`."""
        size = self._size(end)
        self._check_fits(end)
        self._set_start(start)
        if size not in self._places_to:
            self._places_to[size] = self._places[:size]
        args = (tokens, self._start, self._places_to[size], inputs)
        shape = self._shape(tokens.numel(), size, step.kind, inputs)
        runner = step.runners.get(shape)
        if runner is None:
            if (planned := artefacts.planned.get()) is not None:
                return self._plan(planned, step, args)
            for module in modules_in(step.epilogue.compile_key):
                if module not in self._watched and not isinstance(module, StepMemory):
                    read_weights(module)
                    self._watched[module] = Weights(module)
            runner = step.runners[shape] = self._prepare(step, args)
            self.num_prepared += 1
            self._set_start(start)
        return runner(*args)

    def _set_start(self, start: int) -> None:
        if self._start_number is None:
            self._start.fill_(start)
        else:
            self._start_number[()] = start

    def warm_up(
        self, compiled_step: CompiledStep, counts: Sequence[int], *inputs: TensorTree
    ) -> None:
        self._read_weights()
        warmed_up = set()
        for count in counts:
            for size in self._sizes():
                shape = self._shape(count, size, StepKind(all_logits=True))
                if shape in warmed_up or size < count:
                    continue
                warmed_up.add(shape)
                self.pretend(size - count)
                compiled_step(
                    torch.zeros((1, count), dtype=torch.long, device=self.lm.device), *inputs
                )
        self.rewind(0)

    def warm_up_rows(
        self, compiled_step: CompiledStep, examples: Sequence[tuple[TensorTree, ...]]
    ) -> None:
        self._read_weights()
        for example in examples:
            compiled_step(*example)
        self.rewind(0)
        self._zero()

    def _read_weights(self) -> None:
        """Compare every number of the weights with those that steps were prepared for."""
        for module in self._watched:
            read_weights(module)
        self.rewind(0)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        if length:
            return
        watched = self._watched.items()
        # A new text begins, and a model or a head was moved, cast or changed.
        if not all(weights.are_those_of(module) for module, weights in watched):
            self._watched = {module: Weights(module) for module in self._watched}
            self._forget()

    def _forget(self) -> None:
        """Begin without prepared steps."""
        for step in self._steps.values():
            step.runners.clear()
        self._compiled = {}
        self._reader = None

    def padded(self, count: int) -> int:
        return max(2, count)  # so that verification needs no step for one token

    @cached_property
    def reads_rows_together(self) -> bool:  # kept: asked in every step, and configurations are slow
        return self.operations.reads_rows_in_place(self.lm)

    def padded_rows(self, count: int) -> int:
        return max(3, count)  # a compiler takes a size of 1, and what is next to it, for a constant

    def _sizes(self) -> list[int]:
        """Return the sizes of memory that steps are prepared for one by one."""
        return [self._reach]

    def _size(self, end: int) -> int:
        """Return how much memory a forward pass reads that writes as far as `end`."""
        return -(-end // self.bucket) * self.bucket

    def _shape(
        self, count: int, size: int, kind: StepKind, inputs: tuple[TensorTree, ...] = ()
    ) -> tuple[Hashable, ...]:
        """Return the key of the step that serves forward passes over `count` tokens that read
        `size` positions of memory.
        """
        return (self._width(count, kind),)

    def _width(self, count: int, kind: StepKind) -> int:
        """Return which of _WIDTHS a forward pass over `count` tokens is compiled for.

        One drafted token is verified by another step than several, as sizes of 1 are constants:
        padded to three tokens it took 13.7 ms of SmolLM2 with AVX2 in place of 10.9
        (docs/measurements/archive.md).

        In rows and in float32, prepacked weights are the fastest for any number of tokens, with the
        attention that reads rows where they lie: on two cores 256 tokens of 64 rows of nano took
        15.6 ms, not packed 25.4 ms; in bfloat16 there is no difference.
        """
        if (
            kind.rows
            and self.reads_rows_together
            and self.lm.output_embedding.weight.dtype.itemsize > 2
        ):
            return 1
        if count == 2 and kind.all_logits and not kind.rows:
            return 3
        return 0 if count == 1 else 1 if count <= MOST_TOKENS else 2

    def _key(self, step: Step, args: tuple[TensorTree, ...]) -> tuple[Hashable, ...]:
        width = self._width(args[0].numel(), step.kind)
        return step.epilogue.compile_key, step.kind, width

    def _plan(self, jobs: dict[Hashable, Job], step: Step, args: tuple[TensorTree, ...]) -> None:
        key = self._key(step, args)
        if key not in self._compiled and (self, *key) not in jobs:
            # A step that cannot be prepared is reported where it is needed
            with suppress(Exception):
                jobs[self, *key] = self._job(step, args)[0]

    def _prepare(self, step: Step, args: tuple[TensorTree, ...]) -> Runner:
        """Return the compiled step, from disk if it was kept."""
        key = self._key(step, args)
        start = time.perf_counter()
        if key in self._compiled:
            return self._compiled[key]
        try:
            job, module = self._job(step, args)
            compiled_program, was_kept = load_or_compile(job.name, job.compile_program)
            logger.debug(
                "%s %s in %.1f s",
                "loaded" if was_kept else "compiled",
                job.what,
                time.perf_counter() - start,
            )
            runner: Runner = compiled_program.bind(
                module, self._memory, module.operations.bind_step
            )
        except Exception as error:  # a compiler has many ways to fail, all with the same remedy
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            if self.strict:
                raise UserError(
                    f"{type(self.lm.model).__name__} cannot be compiled ({reason}); use"
                    " engine=eager."
                ) from error
            logger.warning("%s runs uncompiled: %s", type(self.lm.model).__name__, reason)
            runner = self._uncompiled(StepOperations, step)
        self._compiled[key] = runner
        return runner

    def _uncompiled(self, operations: type[StepOperations], step: Step) -> Runner:
        computing = operations(self.lm, [], few=False, rows=step.kind.rows)
        module = StepModule(computing, step.epilogue, step.kind)
        return lambda tokens, start, places, inputs: module(
            tokens, start, places, self._memory, inputs
        )

    def _job(self, step: Step, args: tuple[TensorTree, ...]) -> tuple[Job, StepModule]:
        """Return how a step is compiled, and the module that is traced."""
        (epilogue, kind, _) = step
        tokens, first, _, inputs = args
        width = self._width(tokens.numel(), kind)
        tokens = tokens.new_zeros(1, _FEW) if width == 1 and not kind.rows else tokens
        places = self._places[: self.example_buckets * self.bucket]
        operations = self.operations(
            self.lm, modules_in(epilogue.compile_key), width != 2, kind.rows
        )
        module = StepModule(operations, epilogue, kind)
        options = dict(operations.compiler_options)
        options |= (
            CPU_OPTIONS | {"cpp.threads": torch.get_num_threads()}
            if self.lm.device.type == "cpu"
            else OPTIONS
        )
        what = (
            f"{type(epilogue).__name__.lstrip('_')} of {type(self.lm.model).__name__} for"
            f" {_WIDTHS[width]}"
        )
        name = name_of(
            self.lm, epilogue, kind, width, operations.name, options, self._memory, inputs
        )

        def compile_program() -> CompiledProgram:
            logger.info("compiling %s", what)
            of_step: Any = epilogue
            # First those of the tokens' places
            open_inputs = [(0,), *of_step.open_inputs] if kind.rows else []
            open_sizes = {0: 0, 2: 0} if kind.rows else {0: 1, 2: 0} if width in (1, 2) else {2: 0}
            with waiting("compiling a decoding step, once per machine"):
                return CompiledProgram.compile(
                    module,
                    (tokens, first, places, self._memory, inputs),
                    open_sizes,
                    options,
                    open_inputs,
                )

        size = len(self._memory) * (1 + width)  # its layers, and sizes that are open
        return Job(what, name, compile_program, size), module
