"""Steps captured as CUDA graphs, for padded numbers of tokens and doubling sizes of memory: one
launch in place of hundreds.

Static memory needs a mask, which torch's flash attention does not take. For the kernel that takes
one, transformers copies keys and values once for every query head that shares them, and that kernel
has one block of threads for a head, however long the memory is. With attention in groups, the
queries that share keys are rows of one query, nothing is copied, and each part of the memory has
its block of threads. The parts' results are weighted by their sums of exponentials (Dao et al.
2023, Flash-Decoding).
"""

import contextlib
import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._triton import has_triton

from specheads.decoding.engine import artefacts
from specheads.decoding.engine.compiled import (
    CompiledEngine,
    Runner,
    Step,
    StepKind,
    StepOperations,
)
from specheads.decoding.engine.compiled_program import TensorTree, add_leaves, is_same
from specheads.decoding.engine.eager import CompiledStep
from specheads.decoding.engine.reading import Operations, RowPlaces
from specheads.errors import UserError, is_out_of_memory
from specheads.pair.sampling import at_least_float32

logger = logging.getLogger(__name__)

PART = 128  # keys; sizes of memory that a captured step reads are multiples of it
# Added to a masked score; with infinity, a part that is masked throughout would be NaN
_MASKED = -1e30
_WARM_UPS = 3  # runs before a capture, in which libraries allocate what they need

_Step = Callable[[], TensorTree]  # reads and writes the same tensors whenever it is called
_Replay = Callable[[], None]  # does again what a captured step did


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector away: where it destroys the graphs of a dropped engine in
    mid-capture, the capture fails.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _GraphRecorder:
    """Captures steps as CUDA graphs, which share a pool of memory because no two of them run at
    once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Without a stream, `torch.cuda.graph` captures on one stream of the process, on the device
        # that was current when it first captured: nothing that runs on another device is captured
        # there. The pool's memory belongs
        # to a stream, too.
        self._stream = torch.cuda.Stream(device)

    def capture(self, step: _Step) -> tuple[_Replay, TensorTree]:
        """Return the replay of a step, and the tensors of its results.

        Raises RuntimeError for one that waits for the device.
        """
        with torch.cuda.device(self._device), _no_garbage_collection():
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            # Also left if a capture fails, which torch's own context does not do
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    step()
                graph = torch.cuda.CUDAGraph()
                # Threads with other engines may allocate or wait meanwhile, which "global", the
                # default, forbids them.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    out = step()
            current.wait_stream(self._stream)

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay, out


class _ImitatingRecorder:
    """Stands in for CUDA graphs: a replay runs the step again and writes into the tensors of the
    first results.
    """

    def capture(self, step: _Step) -> tuple[_Replay, TensorTree]:
        out = step()

        def replay() -> None:
            for held, new in zip(tree_leaves(out), tree_leaves(step()), strict=True):
                held.copy_(new)

        return replay, out


class _HeldInputs:
    """The tensors from which captured steps read a call's, which are copied there."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._storages = {_storage(tensor) for tensor in tensors}

    def fill(self, given: Sequence[Tensor]) -> None:
        """Copy a call's tensors, in the order of these, except for those that are there already."""
        moved = list[tuple[Tensor, Tensor]]()
        for old, new in zip(self._tensors, given, strict=True):
            if not is_same(old, new):  # one in the place of another would be overwritten first
                moved.append((old, new.clone() if _storage(new) in self._storages else new))
        for old, new in moved:
            old.copy_(new, non_blocking=True)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _update(step: _Step, state: TensorTree) -> TensorTree:
    """Run a step and write its result, the new state, where it reads the old one: the next call
    copies nothing.
    """
    for old, new in zip(add_leaves(state, []), add_leaves(step(), []), strict=True):
        if new is not old:
            old.copy_(new)
    return state


def _recorder_for(device: torch.device) -> _GraphRecorder | _ImitatingRecorder:
    return _GraphRecorder(device) if device.type == "cuda" else _ImitatingRecorder()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Return the attention (B, T, H, D) of `query` (B, H, T, D) over `key` and `value` (B, G, S,
    D), S a multiple of PART.

    `mask`: (B or 1, 1, T, S) bool, which keys a token attends to, one at least; the scale is 1 /
    sqrt(D) by default.
    """
    batch, heads, tokens, _ = query.shape
    groups = key.shape[1]
    num_parts = key.shape[2] // PART
    share = heads // key.shape[1]

    def in_parts(memory: Tensor) -> Tensor:
        # (B G, P, PART, D)
        return memory[:, :, : num_parts * PART].unflatten(2, (num_parts, PART)).flatten(0, 1)

    rows = query.reshape(batch * groups, 1, share * tokens, query.shape[-1]).expand(
        -1, num_parts, -1, -1
    )
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
    bias = bias.masked_fill(~mask, max(_MASKED, torch.finfo(query.dtype).min))[
        :, 0, :, : num_parts * PART
    ]
    # (B or 1, 1, P, 1, T, PART)
    bias = bias.unflatten(2, (num_parts, PART)).transpose(1, 2)[:, None, :, None]
    bias = (
        bias.expand(batch, groups, -1, share, -1, -1)
        if mask.shape[0] > 1
        else bias.expand(-1, -1, -1, share, -1, -1)
    )
    bias = bias.reshape(-1, num_parts, share * tokens, PART).expand(batch * groups, -1, -1, -1)
    out, log_sums = _attend_parts(
        rows,
        in_parts(key),
        in_parts(value),
        bias,
        query.shape[-1] ** -0.5 if scale is None else scale,
    )
    whole = (log_sums.softmax(dim=1)[..., None] * out).sum(dim=1).to(query.dtype)
    return whole.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous()


def _attend_parts(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return each part's attention (N, P, R, D), and the logarithms of its sums of exponentials (N,
    P, R).
    """
    if query.is_cuda and query.dtype != torch.float64:  # the kernel does not have it
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        out, log_sums, *_ = efficient(query, key, value, bias, True, scale=scale)
        return out, log_sums[..., : query.shape[2]]  # the kernel fills rows up
    query, key, value = (at_least_float32(tensor) for tensor in (query, key, value))
    scores = scale * query @ key.transpose(-1, -2) + bias
    log_sums = scores.logsumexp(dim=-1)
    return (scores - log_sums[..., None]).exp() @ value, log_sums


class _GroupedOperations(Operations):
    """Attention in groups where several query heads share keys, under masks that it can take."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
    ) -> Tensor | None:
        shares_keys = key.shape[1] < query.shape[1]
        if not shares_keys or mask.dtype != torch.bool or mask.shape[1] > 1:
            return None
        return _attend(query, key, value, mask, scale)


class _GroupedStep(StepOperations):
    name = "attention in groups"

    def operations(self, places: RowPlaces | None) -> Operations:
        return _GroupedOperations()


class GraphEngine(CompiledEngine):
    """`engine=cuda_graph`: captures compiled steps where Triton can compile them, and plain ones
    elsewhere.
    """

    bucket = PART  # memory grows by the parts of attention in groups
    example_buckets = 2  # a compiler takes the number of parts for a constant if it is 1
    operations = _GroupedStep
    _inputs: dict[Hashable, tuple[TensorTree, ...]]
    _recorder: _GraphRecorder | _ImitatingRecorder

    def warm_up(
        self, compiled_step: CompiledStep, counts: Sequence[int], *inputs: TensorTree
    ) -> None:
        if artefacts.planned.get() is None:  # what is captured cannot be compiled ahead
            super().warm_up(compiled_step, counts, *inputs)

    def warm_up_rows(
        self, compiled_step: CompiledStep, examples: Sequence[tuple[TensorTree, ...]]
    ) -> None:
        """There is nothing to prepare: the sizes of rows are known when they are needed, and
        captured then.
        """

    @property
    def reads_rows_together(self) -> bool:
        """A captured step is one launch.

        A prompt that is read alone takes hundreds for each of its layers.
        """
        return True

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

    def _shape(
        self, count: int, size: int, kind: StepKind, inputs: tuple[TensorTree, ...] = ()
    ) -> tuple[Hashable, ...]:
        return (
            (count, size, *(leaf.shape for leaf in tree_leaves(inputs)))
            if kind.rows
            else (count, size)
        )

    def _prepare(self, step: Step, args: tuple[TensorTree, ...]) -> Runner:
        compiled_step = (
            super()._prepare(step, args)
            if self.lm.device.type == "cuda" and has_triton()
            else self._uncompiled(self.operations, step)
        )
        tokens, start, places, inputs = args
        given = add_leaves((tokens, inputs), [])
        # Graphs of one step share their inputs, whatever their size: the state that one leaves lies
        # where the next reads it.
        shapes = tuple(leaf.shape for leaf in tree_leaves(inputs))
        key = (step.epilogue.compile_key, step.kind, shapes)
        inputs = self._inputs.setdefault(key, tree_map_only(Tensor, torch.clone, inputs))
        tokens = tokens.clone()
        tensors = add_leaves((tokens, inputs), [])
        held = _HeldInputs(tensors)
        earlier = [tensor.clone() for tensor in tensors]
        # Warm-ups write memory, too: at the places of this call, not at those of an earlier one
        held.fill(given)
        captured = partial(compiled_step, tokens, start, places, inputs)
        if getattr(step.epilogue, "updates_last_input", False):
            captured = partial(_update, captured, inputs[-1])
        try:
            replay, out = self._recorder.capture(captured)
        except RuntimeError as error:  # a forward pass that waits for the device cannot be captured
            # A capture that failed may leave its pool unusable
            self._recorder = _recorder_for(self.lm.device)
            if is_out_of_memory(error):
                raise
            # The end of a capture only says that something failed in it
            cause = error.__context__ or error
            reason = next(iter(str(cause).strip().splitlines()), "")
            if self.strict:
                raise UserError(
                    f"{type(self.lm.model).__name__} cannot be captured ({reason}); use"
                    " engine=compiled."
                ) from error
            logger.warning("%s runs uncaptured: %s", type(self.lm.model).__name__, reason)
            return compiled_step
        # The call's tensors may be some of these, in other places; warm-ups have changed a state
        finally:
            for tensor, value in zip(tensors, earlier, strict=True):
                tensor.copy_(value)

        def run(
            tokens: Tensor, start: Tensor, places: Tensor, inputs: tuple[TensorTree, ...]
        ) -> TensorTree:
            held.fill(add_leaves((tokens, inputs), []))
            replay()
            return out

        return run

    def _forget(self) -> None:
        super()._forget()
        self._inputs = {}
        # Results of the dropped graphs may still lie in their pool
        self._recorder = _recorder_for(self.lm.device)
