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


@pytest.fixture
def memory(monkeypatch):
    """What is allowed: rows in a KV cache, rows in a later step, and the error of more of them.

    Returns how many rows each step had.
    """
    allowed = {"rows": 99, "together": 99, "error": None}
    steps = []
    take = TargetRounds.take
    init = BatchDecoder.__init__

    def taken(self, rows, *args):
        steps.append(len(rows))
        if len(rows) > allowed["together"] and len(steps) > 3:
            raise allowed["error"]
        return take(self, rows, *args)

    def allocated(self, pair, rounds):
        if rounds.engines[0].num_rows > allowed["rows"]:
            raise allowed["error"]
        init(self, pair, rounds)

    monkeypatch.setattr(TargetRounds, "take", taken)
    monkeypatch.setattr(BatchDecoder, "__init__", allocated)
    return allowed, steps


@pytest.mark.parametrize("limits", [{"rows": 3}, {"together": 2}], ids=str)
@pytest.mark.parametrize("error", ERRORS, ids=["gpu", "cpu"])
def test_fewer_rows_are_decoded_together_with_the_same_responses(limits, error, memory, caplog):
    pair = tiny_pair(4, scale=1.5)
    whole = responses(pair)
    allowed, steps = memory
    steps.clear()
    allowed |= {**limits, "error": error}
    counted = []
    assert responses(pair, lambda made, left: counted.append(made)) == whole
    assert caplog.text.count("5 rows do not fit into memory; 2 are decoded together") == 1
    assert sum(counted) == sum(len(response.ids) for response in whole)  # no token is made again
    assert max(steps[-3:]) <= 2


def test_a_single_row_that_does_not_fit_is_an_error(memory):
    memory[0].update(rows=0, error=ERRORS[0])
    with pytest.raises(torch.OutOfMemoryError):
        responses(tiny_pair(4))
