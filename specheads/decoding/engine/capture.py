"""CUDA graphs of one engine, on its own device and stream, and what stands in for them without CUDA."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

WARM_UPS = 3  # runs before a capture, in which libraries allocate what they need

Step = Callable[[], Any]  # reads and writes the same tensors whenever it is called
Replay = Callable[[], None]  # does again what a captured step did


class Recorder(Protocol):
    """Captures steps."""

    def capture(self, step: Step) -> tuple[Replay, Any]:
        """Return the replay of a step, and the tensors that it writes the step's results to.

        Raises:
            RuntimeError: a step that cannot be captured, such as one that waits for the device.
        """


class GraphRecorder:
    """Captures steps as CUDA graphs, which share a pool of memory because no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        # Without a stream, `torch.cuda.graph` captures on one stream of the process, on the device that was current when it first
        # captured: nothing that runs on another device is captured there. The pool's memory belongs to a stream, too.
        self._stream = torch.cuda.Stream(device)

    def capture(self, step: Step) -> tuple[Replay, Any]:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):  # also left if a capture fails, which torch's own context does not do
                for _ in range(WARM_UPS):
                    step()
                graph = torch.cuda.CUDAGraph()
                # Threads with other engines may allocate or wait meanwhile, which "global", the default, forbids them.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    out = step()
            current.wait_stream(self._stream)

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay, out


class ImitatingRecorder:
    """Stands in for CUDA graphs: a replay runs the step again and writes into the tensors of the first results."""

    def capture(self, step: Step) -> tuple[Replay, Any]:
        earlier = tree_leaves(step())
        # A result that lies in the same place after every run is there itself; others are new tensors each time.
        out = tree_map_only(Tensor, lambda new: new if any(is_same(new, each) for each in earlier) else new.clone(), step())

        def replay() -> None:
            for held, new in zip(tree_leaves(out), tree_leaves(step()), strict=True):
                if not is_same(held, new):
                    held.copy_(new)

        return replay, out


class HeldInputs:
    """The tensors from which captured steps read a call's, which are copied there."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._storages = tensors, {_storage(tensor) for tensor in tensors}
        # Tensors of one type are copied by one launch, those of several by one each.
        self._groups: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(tensors):
            self._groups.setdefault(tensor.dtype, []).append(number)

    def fill(self, given: Sequence[Tensor]) -> None:
        """Copy a call's tensors, in the order of these, except for those that are there already."""
        held = self._tensors
        sources = {number: self._apart(given[number]) for number, old in enumerate(held) if not is_same(old, given[number])}
        for numbers in self._groups.values():
            new = [number for number in numbers if number in sources]
            if new:
                torch._foreach_copy_([held[number] for number in new], [sources[number] for number in new], non_blocking=True)

    def _apart(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that lies in the place of another one, which would be overwritten first."""
        return tensor.clone() if _storage(tensor) in self._storages else tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors show the same memory in the same way."""
    return first is second or (
        first.data_ptr() == second.data_ptr()
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.stride() == second.stride()
    )


def recorder_for(device: torch.device) -> Recorder:
    """Return what captures steps on a device."""
    return GraphRecorder(device) if device.type == "cuda" else ImitatingRecorder()
