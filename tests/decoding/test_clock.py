"""The clock marks moments on GPUs that decode without waiting for them, and reads several after one
wait; GPUs are faked.
"""

import time

import pytest
import torch

from specheads.decoding.records import Clock


class FakeWeight:
    def __init__(self, device):
        self.device = torch.device(device)


class FakeModel:
    """A model on devices, as far as a clock looks at it."""

    def __init__(self, *devices):
        self.model = self
        self.device = torch.device(devices[0])
        self.parameters = lambda: iter([FakeWeight(device) for device in devices])


class Queue:
    """A GPU's stream: the milliseconds until all that was issued is done."""

    def __init__(self):
        self.busy_until = 0.0

    def wait_stream(self, other):
        self.busy_until = max(self.busy_until, other.busy_until)


class FakeCuda:
    def __init__(self):
        self.queues = {}
        self.waits = []

    def current_stream(self, device):
        return self.queues.setdefault(device.index, Queue())

    def synchronize(self, *device):
        raise AssertionError("a whole device is waited for")


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self, queue):
            self.queue = queue
            self.at = queue.busy_until

        def synchronize(self):
            fake.waits.append(self)

        def elapsed_time(self, end):
            assert end.queue is self.queue, "times of two GPUs cannot be compared"
            assert fake.waits and end.at <= fake.waits[-1].at, (
                "an event is read that may not have happened"
            )
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    return fake


def test_marks_on_several_gpus_are_read_after_one_wait(cuda):
    clock = Clock([FakeModel("cuda:1"), FakeModel("cuda:3")])
    target = cuda.queues[1]
    draft = cuda.queues[3]
    assert set(cuda.queues) == {1, 3}
    marks = []
    for times in range(1, 4):  # rounds of 5 + 20 + 0 ms; the host waits for nothing in between
        marks = [clock.mark()]
        draft.busy_until += 5
        marks.append(clock.mark())
        target.busy_until += 20
        draft.busy_until = target.busy_until  # it waits for the verification
        marks += [clock.mark(), clock.mark()]
        assert len(cuda.waits) == times - 1
        began, drafted, verified, ended = clock.read(*marks)
        assert len(cuda.waits) == times and cuda.waits[-1] is marks[-1]
        assert (drafted - began, verified - drafted, ended - verified) == pytest.approx(
            (0.005, 0.02, 0)
        )
        assert ended == pytest.approx(0.025 * times)  # since the clock was made


def test_times_of_a_long_run_keep_their_resolution(cuda):
    """CUDA has 24 bits for the milliseconds between two events."""
    event = torch.cuda.Event
    rounded = event.elapsed_time
    event.elapsed_time = lambda self, end: float(
        torch.tensor(rounded(self, end), dtype=torch.float32)
    )
    clock = Clock([FakeModel("cuda:0")])
    for _ in range(3):
        cuda.queues[0].busy_until += 3.6e6 + 0.07  # an hour in which nobody looks
        start = clock.mark()
        cuda.queues[0].busy_until += 0.13
        began, ended = clock.read(start, clock.mark())
        assert ended - began == pytest.approx(0.00013, rel=1e-3)


def test_on_a_cpu_marks_are_the_times_of_the_host(cuda):
    clock = Clock([FakeModel("cpu")])
    before = time.perf_counter()
    first, second = clock.read(clock.mark(), clock.mark())
    assert before <= first <= second <= time.perf_counter()
    assert not cuda.queues and not cuda.waits
