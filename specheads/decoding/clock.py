"""When the stages of a round were done: on the host, or in the queues of the GPUs that decode."""

import time
from collections.abc import Iterable
from typing import Any

import torch

from specheads.pair.language_model import LanguageModel

Mark = Any  # the host's seconds, or an event in the queue of the first GPU


class Clock:
    """Marks moments of decoding and reads several of them at once.

    On GPUs a mark is an event, which no one waits for; reading waits for the last mark, after which the host may overwrite what
    the devices were to read. GPUs that decode nothing are left alone: a process that waits for one makes a context on it.
    """

    def __init__(self, models: Iterable[LanguageModel]) -> None:
        # A model that is spread over several GPUs begins on the first of them.
        spread = [lm.model.parameters() for lm in models if lm.device.type == "cuda"]
        devices = dict.fromkeys(weight.device for weights in spread for weight in weights)
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._last: tuple[Mark, float] = (self.mark(), 0.0)

    def mark(self) -> Mark:
        """Return the moment at which all that was issued so far is done."""
        if not self._gpus:
            return time.perf_counter()
        queue, *others = [torch.cuda.current_stream(gpu) for gpu in self._gpus]
        for other in others:
            queue.wait_stream(other)  # times of one GPU alone can be compared
        event = torch.cuda.Event(enable_timing=True)
        event.record(queue)
        return event

    def read(self, *marks: Mark) -> list[float]:
        """Return the times of marks, in the order in which they were made, as seconds since some moment."""
        if not self._gpus:
            return list(marks)
        marks[-1].synchronize()
        times, (last, seconds) = [], self._last
        for mark in marks:
            # From one mark to the next: over a long time the difference of two events is rounded to more than a stage takes.
            seconds += last.elapsed_time(mark) / 1000
            times.append(seconds)
            last = mark
        self._last = last, seconds
        return times
