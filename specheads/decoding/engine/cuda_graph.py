"""Steps captured as CUDA graphs, for padded numbers of tokens and doubling sizes of memory.

A replay is one launch where the step has hundreds. It reads and writes the tensors of its capture, so a call's tensors are copied
in first. Without CUDA the captured step is run again on the same tensors, which is slow but the same code; see capture.py.
"""

import logging
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._triton import has_triton

from specheads.decoding.engine.capture import recorder_for
from specheads.decoding.engine.compile_plan import Plan
from specheads.decoding.engine.compiled import CompiledEngine
from specheads.decoding.engine.eager import CompiledStep, Epilogue
from specheads.decoding.engine.static import Runner, StepKind, run_step
from specheads.errors import UserError
from specheads.language_model import LanguageModel

logger = logging.getLogger(__name__)


class GraphEngine(CompiledEngine):
    """`engine=cuda_graph`: captures compiled steps where Triton can compile them, and plain ones elsewhere."""

    bucket = 128

    def __init__(self, lm: LanguageModel, capacity: int, strict: bool = True, spare_capacity: int = 0, num_rows: int = 1) -> None:
        super().__init__(lm, capacity, strict, spare_capacity, num_rows)
        self._compiles = lm.device.type == "cuda" and has_triton()
        self._inputs: dict[Hashable, tuple[Any, ...]] = {}
        self._recorder = recorder_for(lm.device)

    def warm_up(self, compiled_step: CompiledStep, counts: Sequence[int], *inputs: Any) -> None:
        if Plan.active is None:  # what is captured cannot be compiled ahead
            super().warm_up(compiled_step, counts, *inputs)

    def warm_up_rows(self, compiled_step: CompiledStep, examples: Sequence[tuple[Any, ...]]) -> None:
        """There is nothing to prepare: the sizes of rows are known when they are needed, and captured then."""

    @property
    def reads_rows_together(self) -> bool:
        return False

    def padded(self, count: int) -> int:
        """Return the next of 4, 6, 8, 12, 16, 24, 32, 40, ..."""
        step = 2 if count <= 8 else 4 if count <= 16 else 8
        return max(4, -(-count // step) * step)

    def padded_rows(self, count: int) -> int:
        """Return the next power of two from 4 on."""
        return max(4, 1 << (count - 1).bit_length())

    def _size(self, end: int) -> int:
        return min(self._reach, self.bucket << (-(-end // self.bucket) - 1).bit_length())

    def _sizes(self) -> list[int]:
        return sorted({self._size(end) for end in range(self.bucket, self._reach + 1, self.bucket)})

    def _shape(self, count: int, size: int) -> tuple[int, ...]:
        return (count, size)

    def _rows_shape(self, count: int, size: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (count, size, *(leaf.shape for leaf in tree_leaves(inputs)))

    def _prepare(self, epilogue: Epilogue, kind: StepKind, args: tuple[Any, ...]) -> Runner:
        if self._compiles:
            compiled_step = super()._prepare(epilogue, kind, args)
        else:
            compiled_step = partial(run_step, self.lm, epilogue, kind, self._memory)
        tokens, start, places, inputs = args
        # Graphs of one step share their inputs, whatever their size: a draft's distributions are large.
        key = (epilogue.compile_key, kind, tuple(leaf.shape for leaf in tree_leaves(inputs)))
        inputs = self._inputs.setdefault(key, tree_map_only(Tensor, torch.clone, inputs))
        static = (tokens.clone(), inputs)
        try:
            replay, out = self._recorder.capture(lambda: compiled_step(static[0], start, places, static[1]))
        except RuntimeError as error:  # a forward pass that waits for the device cannot be captured
            reason = next(iter(str(error).strip().splitlines()), "")
            if self.strict:
                raise UserError(f"{type(self.lm.model).__name__} cannot be captured ({reason}); use engine=compiled.") from error
            logger.warning("%s runs uncaptured: %s", type(self.lm.model).__name__, reason)
            return compiled_step
        held = tree_leaves(static)

        def run(tokens: Tensor, start: Tensor, places: Tensor, inputs: tuple[Any, ...]) -> Any:
            torch._foreach_copy_(held, tree_leaves((tokens, inputs)), non_blocking=True)
            replay()
            return out

        return run

    def _forget(self) -> None:
        super()._forget()
        self._inputs.clear()
