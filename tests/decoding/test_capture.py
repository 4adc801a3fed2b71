"""Steps are captured on the device and the stream of their engine.

CUDA is a record of calls here.
"""

import gc
from contextlib import contextmanager

import pytest
import torch

from specheads.decoding.engine.cuda_graph import (
    _WARM_UPS,
    _GraphRecorder,
    _HeldInputs,
    _ImitatingRecorder,
    _recorder_for,
)


class Stream:
    def __init__(self, device):
        self.device = device
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


class FakeCuda:
    """What a recorder calls of torch.cuda, for any number of devices."""

    def __init__(self):
        self.device_now = torch.device("cuda:0")
        self.stream_now = {}
        self.capturing = None
        self.streams = []
        self.captures = []

    def Stream(self, device=None):
        self.streams.append(Stream(device or self.device_now))
        return self.streams[-1]

    def current_stream(self, device=None):
        return self.stream_now.setdefault(
            device or self.device_now, Stream(device or self.device_now)
        )

    @contextmanager
    def device(self, device):
        kept = self.device_now
        self.device_now = device
        try:
            yield
        finally:
            self.device_now = kept

    @contextmanager
    def stream(self, stream):
        kept = self.current_stream(stream.device)
        self.stream_now[stream.device] = stream
        try:
            yield
        finally:
            self.stream_now[stream.device] = kept

    @contextmanager
    def graph(self, graph, **options):
        """As torch's: an error leaves its stream the current one."""
        self.captures.append(options)
        kept = self.current_stream(options["stream"].device)
        self.stream_now[options["stream"].device] = options["stream"]
        self.capturing = graph
        yield
        self.capturing = None
        self.stream_now[options["stream"].device] = kept

    def CUDAGraph(self):
        cuda = self

        class Graph:
            def __init__(self):
                self.replayed_on = []

            def replay(self):
                self.replayed_on.append(cuda.device_now)

        return Graph()

    def graph_pool_handle(self):
        return object()


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    for name in (
        "Stream",
        "current_stream",
        "device",
        "stream",
        "graph",
        "CUDAGraph",
        "graph_pool_handle",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


@pytest.mark.parametrize("number", [0, 1])
def test_a_step_is_warmed_up_and_captured_on_its_own_device_and_stream(cuda, number):
    device = torch.device("cuda", number)
    runs = []
    graphs = []
    recorder = _recorder_for(device)
    assert isinstance(recorder, _GraphRecorder)

    def step():
        runs.append((cuda.device_now, cuda.current_stream(device), cuda.capturing is not None))
        graphs.append(cuda.capturing)
        return "results"

    replay, out = recorder.capture(step)
    (stream,) = [each for each in cuda.streams if each.device == device]
    assert (
        runs == [(device, stream, False)] * _WARM_UPS + [(device, stream, True)]
        and out == "results"
    )
    assert cuda.captures == [
        {"pool": recorder._pool, "stream": stream, "capture_error_mode": "thread_local"}
    ]
    # What was issued before is finished first, and what comes later waits for the runs.
    caller = cuda.current_stream(device)
    assert stream.waited_for == [caller] and caller.waited_for == [stream]
    assert cuda.device_now == torch.device("cuda:0")
    replay()
    assert graphs[-1].replayed_on == [device] and cuda.device_now == torch.device("cuda:0")


@pytest.mark.parametrize("was_enabled", [True, False])
def test_no_garbage_is_collected_in_mid_capture(cuda, was_enabled):
    """Or the graphs of a dropped engine would be destroyed there, which CUDA forbids."""
    collecting = []

    def step():
        collecting.append(gc.isenabled())
        if len(collecting) > 5:
            raise RuntimeError("out of luck")

    recorder = _recorder_for(torch.device("cuda:0"))
    kept = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        recorder.capture(step)
        with pytest.raises(RuntimeError):
            recorder.capture(step)
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if kept else gc.disable)()
    assert collecting == [False] * 6


def test_two_engines_capture_on_streams_of_their_own_and_each_always_on_the_same(cuda):
    recorders = [_recorder_for(torch.device("cuda", number)) for number in (0, 1)]
    for recorder in (*recorders, *recorders):
        recorder.capture(lambda: None)
    streams = [options["stream"] for options in cuda.captures]
    assert streams[:2] == streams[2:] and streams[0] is not streams[1]
    assert [stream.device.index for stream in streams[:2]] == [0, 1]
    assert len({id(options["pool"]) for options in cuda.captures}) == 2


def test_a_step_that_cannot_be_captured_leaves_the_stream_of_its_engine(cuda):
    device = torch.device("cuda:0")
    caller = cuda.current_stream(device)
    recorder = _recorder_for(device)

    def step():
        if cuda.capturing is not None:
            raise RuntimeError("waits for the device")

    with pytest.raises(RuntimeError, match="waits"):
        recorder.capture(step)
    assert cuda.current_stream(device) is caller


def test_a_replay_of_the_stand_in_writes_where_the_first_run_wrote():
    given = torch.zeros(2)
    recorder = _recorder_for(torch.device("cpu"))
    assert isinstance(recorder, _ImitatingRecorder)
    replay, (out,) = recorder.capture(lambda: (given + 1,))
    assert out.tolist() == [1, 1]
    given.fill_(4)
    assert out.tolist() == [1, 1]
    replay()
    assert out.tolist() == [5, 5]


def test_a_result_that_lies_in_one_place_is_there_after_a_replay():
    state = torch.zeros(2)
    replay, (out, other) = _recorder_for(torch.device("cpu")).capture(
        lambda: (state.add_(1), state + 1)
    )
    assert out is state and other.data_ptr() != state.data_ptr()
    number = state[0].item()
    replay()
    assert out.tolist() == [number + 1] * 2 and other.tolist() == [number + 2] * 2


@pytest.fixture
def copies(monkeypatch):
    """The lists of tensors that were copied by one call each."""
    calls = []
    copy = torch._foreach_copy_

    def counted(held, given, non_blocking):
        calls.append((list(held), list(given)))
        copy(held, given, non_blocking=non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    return calls


def test_inputs_of_one_type_are_copied_together_and_those_in_place_not_at_all(copies):
    held = [
        torch.zeros(2),
        torch.zeros(3, dtype=torch.long),
        torch.zeros(()),
        torch.zeros(1, dtype=torch.bool),
    ]
    inputs = _HeldInputs(held)
    given = [torch.ones(2), torch.arange(3), torch.tensor(7.0), torch.tensor([True])]
    inputs.fill(given)
    assert all(torch.equal(old, new) for old, new in zip(held, given, strict=True))
    assert [[tensor.dtype for tensor in new] for _, new in copies] == [
        [torch.float32] * 2,
        [torch.int64],
        [torch.bool],
    ]
    copies.clear()
    inputs.fill([held[0], given[1], held[2].view(()), held[3]])
    assert [len(new) for _, new in copies] == [1] and copies[0][1][0] is given[1]


def test_inputs_that_lie_in_the_places_of_others_are_not_lost():
    held = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]
    _HeldInputs(held).fill([held[1], held[2], held[0]])
    assert [tensor.item() for tensor in held] == [2, 3, 1]
    wide = torch.arange(4.0)
    _HeldInputs([wide]).fill([wide.flip(0)[:4]])
    assert wide.tolist() == [3, 2, 1, 0]
