"""Steps compiled by Inductor: once for one token, once for a few and once for many; in rows, in float32, once for all."""

import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from specheads.decoding.engine.artefacts import load_or_compile, name_of
from specheads.decoding.engine.attention import computing
from specheads.decoding.engine.compile_plan import Job, Plan
from specheads.decoding.engine.compiled_program import CPU_OPTIONS, OPTIONS, CompiledProgram, modules_in
from specheads.decoding.engine.eager import Epilogue, RowsEpilogue
from specheads.decoding.engine.reading import RowPlaces
from specheads.decoding.engine.static import Memory, Runner, StaticEngine, StaticStep, StepKind, run_step
from specheads.errors import UserError
from specheads.pair.language_model import LanguageModel
from specheads.pair.sampling import Operations

logger = logging.getLogger(__name__)

WIDTHS = ("one token", "a few tokens", "many tokens")
MOST_TOKENS = 64  # of "a few": with more, BLAS on the weights as they are is about as fast as packed copies
FEW = 5  # example tokens for "a few": sizes of 1, and those next to them, would be compiled as constants


class StepOperations(nn.Module):
    """What one step computes with: here torch. It owns the tensors that it reads in place of the model's and the epilogue's."""

    compiler_options: Mapping[str, Any] = {}
    reads_all_rows = False  # a step in rows gives attention the memory of all rows, not a copy for each token
    name: Hashable = "torch"  # compiled code depends on it

    def __init__(self, lm: LanguageModel, modules: Sequence[nn.Module], few: bool, rows: bool) -> None:
        """Choose for a step.

        Args:
            modules: of the epilogue.
            few: whether a step over one token or a few is prepared.
            rows: whether it reads rows.
        """
        super().__init__()
        self.lm = lm  # computes as the step should

    @classmethod
    def reads_rows_in_place(cls, lm: LanguageModel) -> bool:
        """Whether attention reads rows where they lie; copies would cost more than one prompt after another."""
        return False

    def operations(self, places: RowPlaces | None) -> Operations:
        """Return what a forward pass and the epilogue compute with; `places` of the tokens of a step in rows."""
        return Operations()


class StepModule(nn.Module):
    """`run_step` as a module that owns the weights it reads."""

    def __init__(self, operations: StepOperations, epilogue: Epilogue, kind: StepKind) -> None:
        super().__init__()
        self.model, self.others = operations.lm.model, nn.ModuleList(modules_in(epilogue.compile_key))
        self.operations, self.kind = operations, kind
        self.run_step = partial(run_step, operations.lm, epilogue, kind)

    def forward(self, tokens: Tensor, start: Tensor, places: Tensor, memory: Memory, inputs: tuple[Any, ...]) -> Any:
        chosen = slice(None) if self.operations.reads_all_rows else None
        with computing(self.operations.operations(inputs[0] if self.kind.rows else None)):
            return self.run_step(memory, tokens, start, places, inputs, chosen=chosen)


class CompiledEngine(StaticEngine):
    """`engine=compiled`.

    Args:
        strict: raise UserError if a step cannot be compiled, instead of running it uncompiled.
        operations: what steps compute with.
    """

    def __init__(
        self,
        lm: LanguageModel,
        capacity: int,
        strict: bool = True,
        spare_capacity: int = 0,
        num_rows: int = 1,
        operations: type[StepOperations] = StepOperations,
    ) -> None:
        super().__init__(lm, capacity, spare_capacity, num_rows)
        self.strict, self.operations = strict, operations
        self._compiled: dict[Hashable, Runner] = {}

    def _forget(self) -> None:
        super()._forget()
        self._compiled.clear()
        vars(self).pop("reads_rows_together", None)  # it depends on the device

    def padded(self, count: int) -> int:
        """Return at least 3, so that verification needs no separate steps for one or two tokens.

        Those leave a size of 1, which a compiler takes for a constant.
        """
        return max(3, count)

    @cached_property
    def reads_rows_together(self) -> bool:  # kept: asked in every step, and configurations are slow
        return self.operations.reads_rows_in_place(self.lm)

    def padded_rows(self, count: int) -> int:
        return self.padded(count)

    def _shape(self, count: int, size: int) -> tuple[int, ...]:
        return (self._width(count),)

    def _rows_shape(self, count: int, size: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._width(count, in_rows=True),)

    def _width(self, count: int, in_rows: bool = False) -> int:
        """Return which of WIDTHS a forward pass over `count` tokens is compiled for.

        In rows and in float32, packed maps are the fastest for any number of tokens, with the attention that reads rows where
        they lie. On two cores, packed and not packed: 128 and 256 tokens of 64 rows of nano 9.5 and 15.1 ms, 15.6 and 25.4 ms,
        of mini 24.0 and 36.6 ms, 37.6 and 57.2 ms, 128 of 32 rows of 300 M parameters 208 and 457 ms; prompts of 3,390 tokens of
        mini 346 and 530 ms. In bfloat16 128 and 256 tokens of mini took 24.2 and 23.3 ms, 40.9 and 39.2 ms.
        """
        if in_rows and self.reads_rows_together and self.lm.output_embedding.weight.dtype.itemsize > 2:
            return 1
        return 0 if count == 1 else 1 if count <= MOST_TOKENS else 2

    @property
    def _example_size(self) -> int:
        """The positions that a step reads while it is traced."""
        return self.bucket

    def _prepare(self, epilogue: Epilogue, kind: StepKind, args: tuple[Any, ...]) -> Runner:
        """Return the compiled step, from disk if it was kept."""
        key = (epilogue.compile_key, kind, self._width(args[0].numel(), kind.rows))
        if key not in self._compiled:
            try:
                self._compiled[key] = self._compile(epilogue, kind, args)
            except Exception as error:  # a compiler has many ways to fail, all with the same remedy
                reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
                if self.strict:
                    raise UserError(f"{type(self.lm.model).__name__} cannot be compiled ({reason}); use engine=eager.") from error
                logger.warning("%s runs uncompiled: %s", type(self.lm.model).__name__, reason)
                self._compiled[key] = self._uncompiled(epilogue, kind)
        return self._compiled[key]

    def _prepared(self, step: StaticStep, shape: tuple[Any, ...], args: tuple[Any, ...]) -> Runner:
        if Plan.active is None:
            return super()._prepared(step, shape, args)
        key = (step.epilogue.compile_key, step.kind, self._width(args[0].numel(), step.kind.rows))
        if key not in self._compiled and (self, *key) not in Plan.active.jobs:
            with suppress(Exception):  # a step that cannot be prepared is reported where it is needed
                Plan.active.jobs[self, *key] = self._job(step.epilogue, step.kind, args)[0]
        return lambda *args: None

    def _compile(self, epilogue: Epilogue, kind: StepKind, args: tuple[Any, ...]) -> Runner:
        start = time.perf_counter()
        job, module = self._job(epilogue, kind, args)
        compiled_program, was_kept = load_or_compile(job.name, job.compile_program)
        logger.info("%s %s in %.1f s", "loaded" if was_kept else "compiled", job.what, time.perf_counter() - start)
        return compiled_program.bind(module, self._memory)

    def _job(self, epilogue: Epilogue, kind: StepKind, args: tuple[Any, ...]) -> tuple[Job, StepModule]:
        """Return how a step is compiled, and the module that is traced."""
        tokens, first, _, inputs = args
        width = self._width(tokens.numel(), kind.rows)
        tokens, places = tokens.new_zeros(1, FEW) if width == 1 and not kind.rows else tokens, self._places[: self._example_size]
        operations = self.operations(self.lm, modules_in(epilogue.compile_key), width < 2, kind.rows)
        module = StepModule(operations, epilogue, kind)
        options = dict(operations.compiler_options)
        options |= CPU_OPTIONS | {"cpp.threads": torch.get_num_threads()} if self.lm.device.type == "cpu" else OPTIONS
        what = f"{type(epilogue).__name__.lstrip('_')} of {type(self.lm.model).__name__} for {WIDTHS[width]}"
        name = name_of(self.lm, epilogue, kind, width, operations.name, options, self._memory, inputs)

        def compile_program() -> CompiledProgram:
            logger.info("compiling %s", what)
            example = (tokens, first, places, self._memory, inputs)
            if kind.rows:
                open_inputs = [(0,), *cast(RowsEpilogue, epilogue).open_inputs]  # places, then the epilogue's
                return CompiledProgram.compile(module, example, {0: 0, 2: 0}, options, open_inputs)
            return CompiledProgram.compile(module, example, {0: 1, 2: 0} if width else {2: 0}, options)

        size = len(self._memory) * (1 + width)  # its layers, and sizes that are open
        return Job(what, name, compile_program, size), module
