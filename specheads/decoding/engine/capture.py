"""CUDA graphs of one engine, on its own device and stream, and what stands in for them without CUDA."""

from collections.abc import Callable
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
        out = tree_map_only(Tensor, torch.clone, step())

        def replay() -> None:
            for held, new in zip(tree_leaves(out), tree_leaves(step()), strict=True):
                held.copy_(new)

        return replay, out


def recorder_for(device: torch.device) -> Recorder:
    """Return what captures steps on a device."""
    return GraphRecorder(device) if device.type == "cuda" else ImitatingRecorder()
