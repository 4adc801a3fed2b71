"""Where the memory of a device does not suffice for a batch of responses, smaller ones are made,
which is said.
"""

import numpy as np
import pytest
import torch
from fakes import tiny_pair

from specheads import Warp
from specheads.decoding.batching import BatchDecoder
from specheads.decoding.responses import Responder, row_uniforms
from specheads.decoding.rounds import TargetRounds
from specheads.prompts.prompt import ResponseLimits

PROMPTS = [[number % 4, 1, 2][: 1 + number % 3] for number in range(6)]
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    ),
]


def responses(pair, on_step=lambda made, left: None):
    uniform = np.stack([row_uniforms(0, f"{number:x}", 8)[0] for number in range(len(PROMPTS))])
    limits = ResponseLimits(8, batch_size=5)
    return Responder(pair, list(map(len, PROMPTS)), limits, engine="eager").respond(
        PROMPTS, uniform, Warp(), on_step
    )


@pytest.mark.parametrize("where", ["memory", "steps"])
@pytest.mark.parametrize("error", ERRORS, ids=["gpu", "cpu"])
def test_fewer_rows_are_decoded_together_with_the_same_responses(where, error, monkeypatch, caplog):
    pair = tiny_pair(4, scale=1.5)
    calls = []
    whole = responses(pair)
    take = TargetRounds.take
    init = BatchDecoder.__init__

    def taken(self, rows, *args):
        calls.append(len(rows))
        if where == "steps" and len(rows) > 2 and len(calls) > 3:
            raise error
        return take(self, rows, *args)

    def allocated(self, pair, rounds):
        if where == "memory" and rounds.engines[0].num_rows > 3:
            raise error
        init(self, pair, rounds)

    monkeypatch.setattr(TargetRounds, "take", taken)
    monkeypatch.setattr(BatchDecoder, "__init__", allocated)
    counted = []
    assert responses(pair, lambda made, left: counted.append(made)) == whole
    assert caplog.text.count("5 rows do not fit into memory; 2 are decoded together") == 1
    assert sum(counted) == sum(len(response.ids) for response in whole)  # no token is made again
    assert max(calls[-3:]) <= 2


def test_a_single_row_that_does_not_fit_is_an_error(monkeypatch):
    def full(self, rows, *args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TargetRounds, "take", full)
    with pytest.raises(torch.OutOfMemoryError):
        responses(tiny_pair(4))
