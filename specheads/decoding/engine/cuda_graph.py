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

from specheads.decoding.engine.attention import PART, GroupedOperations, computing, is_faster
from specheads.decoding.engine.capture import HeldInputs, Replay, Step, recorder_for
from specheads.decoding.engine.compile_plan import Plan
from specheads.decoding.engine.compiled import CompiledEngine, StepOperations
from specheads.decoding.engine.compiled_program import leaves_of
from specheads.decoding.engine.eager import CompiledStep, Epilogue
from specheads.decoding.engine.reading import RowPlaces
from specheads.decoding.engine.static import Runner, StepKind, run_step
from specheads.errors import UserError, is_out_of_memory
from specheads.pair.language_model import LanguageModel
from specheads.pair.sampling import Operations

logger = logging.getLogger(__name__)


class GroupedStep(StepOperations):
    """A step with attention in groups."""

    name = "attention in groups"

    def operations(self, places: RowPlaces | None) -> Operations:
        return GroupedOperations()


class GraphEngine(CompiledEngine):
    """`engine=cuda_graph`: captures compiled steps where Triton can compile them, and plain ones elsewhere."""

    bucket = PART  # of attention in groups
    _joined: Tensor | None = None  # the memory of one text, (layers * 2, 1, heads, capacity, head size), if layers are alike

    def __init__(self, lm: LanguageModel, capacity: int, strict: bool = True, spare_capacity: int = 0, num_rows: int = 1) -> None:
        super().__init__(lm, capacity, strict, spare_capacity, num_rows)
        self._compiles = lm.device.type == "cuda" and has_triton()
        self._inputs: dict[Hashable, tuple[Any, ...]] = {}
        self._recorder = recorder_for(lm.device)
        if self._groups_queries():
            self.operations = GroupedStep

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate the memory of all layers as one tensor: two launches move what a tree keeps, where each layer takes four."""
        super().allocate()
        tensors = self._key_value_tensors()
        if len({(memory.shape, memory.dtype, memory.device) for memory in tensors}) != 1:
            return
        shape, like = (len(tensors), *tensors[0].shape), tensors[0].new_empty(0)
        del tensors
        for layer in self._written():  # so that the memory is never there twice
            layer.keys = layer.values = like
        self._joined = like.new_zeros(shape)
        for layer, memory in zip(self._written(), self._joined.split(2), strict=True):
            layer.keys, layer.values = memory

    def _key_value_tensors(self) -> list[Tensor]:
        return super()._key_value_tensors() if self._joined is None else [self._joined]

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

    @property
    def _example_size(self) -> int:
        return 2 * self.bucket  # a compiler takes the number of parts of attention for a constant if it is 1

    def _shape(self, count: int, size: int) -> tuple[int, ...]:
        return (count, size)

    def _rows_shape(self, count: int, size: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (count, size, *(leaf.shape for leaf in tree_leaves(inputs)))

    def _prepare(self, epilogue: Epilogue, kind: StepKind, args: tuple[Any, ...]) -> Runner:
        compiled_step = super()._prepare(epilogue, kind, args) if self._compiles else self._uncompiled(epilogue, kind)
        tokens, start, places, inputs = args
        given = leaves_of((tokens, inputs))
        # Graphs of one step share their inputs, whatever their size: the state that one leaves lies where the next reads it.
        key = (epilogue.compile_key, kind, tuple(leaf.shape for leaf in tree_leaves(inputs)))
        inputs = self._inputs.setdefault(key, tree_map_only(Tensor, torch.clone, inputs))
        tokens = tokens.clone()
        tensors = leaves_of((tokens, inputs))
        held, earlier = HeldInputs(tensors), [tensor.clone() for tensor in tensors]
        held.fill(given)  # warm-ups write memory, too: at the places of this call, not at those of an earlier one
        step = partial(compiled_step, tokens, start, places, inputs)
        try:
            if getattr(epilogue, "updates_last_input", False):
                replay, out = self._capture_update(step, inputs[-1])
            else:
                replay, out = self._recorder.capture(step)
        except RuntimeError as error:  # a forward pass that waits for the device cannot be captured
            self._recorder = recorder_for(self.lm.device)  # a capture that failed may leave its pool unusable
            if is_out_of_memory(error):
                raise
            cause = error.__context__ or error  # the end of a capture only says that something failed in it
            reason = next(iter(str(cause).strip().splitlines()), "")
            if self.strict:
                raise UserError(f"{type(self.lm.model).__name__} cannot be captured ({reason}); use engine=compiled.") from error
            logger.warning("%s runs uncaptured: %s", type(self.lm.model).__name__, reason)
            return compiled_step
        finally:  # the call's tensors may be some of these, in other places; warm-ups have changed a state
            for tensor, value in zip(tensors, earlier, strict=True):
                tensor.copy_(value)

        def run(tokens: Tensor, start: Tensor, places: Tensor, inputs: tuple[Any, ...]) -> Any:
            held.fill(leaves_of((tokens, inputs)))
            replay()
            return out

        return run

    def _uncompiled(self, epilogue: Epilogue, kind: StepKind) -> Runner:
        return partial(self._run_step, epilogue, kind)

    def _run_step(self, epilogue: Epilogue, kind: StepKind, *args: Any) -> Any:
        with computing(GroupedOperations() if self.operations is GroupedStep else Operations()):
            return run_step(self.lm, epilogue, kind, self._memory, *args)

    def _groups_queries(self) -> bool:
        """Whether attention in groups is the better one for steps; a GPU is asked for it. Without one, it is the one to test."""
        keys = next((keys for keys, _ in self._memory if keys.numel()), None)
        if self.lm.config._attn_implementation != "sdpa" or keys is None:
            return False
        if self.lm.device.type != "cuda":
            return True
        shape = keys.shape[1], self._reach, keys.shape[3]
        return is_faster(keys.device, keys.dtype, self.lm.config.num_attention_heads, shape)

    def _capture_update(self, step: Step, state: Any) -> tuple[Replay, Any]:
        """Capture a step that writes its result, the new state, where it reads the old one: the next call copies nothing."""
        held = leaves_of((state,))

        def update() -> Any:
            for old, new in zip(held, leaves_of((step(),)), strict=True):
                if new is not old:
                    old.copy_(new)
            return state

        return self._recorder.capture(update)

    def _forget(self) -> None:
        super()._forget()
        self._inputs.clear()
        self._recorder = recorder_for(self.lm.device)  # results of the dropped graphs may still lie in their pool
