"""How many tokens per second do the target's responses and their labels take?

The pair has the shapes of Llama 3.1 8B and Llama 3.2 1B and random weights; prompts are random tokens. No response ends early.
"""

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu.machine import Setup, made_up_prompts
from benchmarks.results import Column, Table, Value
from benchmarks.steps import now
from data_gen.labels import label_responses
from specheads import Warp
from specheads.decoding.responses import Responder
from specheads.prompts.encoding import ResponseLimits

WARP = Warp(1.0, top_k=50)
ROWS = (1, 16, 64)  # responses that are written together
PROMPT_TOKENS, NEW_TOKENS = 128, 128
SAMPLES = 2  # drafted tokens that are labelled at each position


@torch.no_grad()
def tables(setup: Setup, goals: dict[str, float]) -> Iterator[Table]:
    """Yield the table of speeds, each of a second pass."""
    pair, num_tokens = setup.pair(), 8 if setup.tiny else NEW_TOKENS
    sizes = ROWS[:1] if setup.tiny else ROWS
    prompts = made_up_prompts(pair, 2 if setup.tiny else max(ROWS), 8 if setup.tiny else PROMPT_TOKENS)
    rows: list[list[Value]] = []
    for size in sizes:
        limits = ResponseLimits(num_tokens, batch_size=size)
        responder = Responder(pair, [len(prompt) for prompt in prompts[:size]], limits, engine=setup.engine)
        uniform = np.random.default_rng(1).random((size, num_tokens))
        for _ in range(2):
            start = now(setup.device)
            made = responder.respond(prompts[:size], uniform, WARP)
            taken = now(setup.device) - start
        rows.append([f"responses, {size} at once", sum(len(response.ids) for response in made) / taken])
    responses = made_up_prompts(pair, len(prompts), num_tokens)
    uniform = np.random.default_rng(0).random((len(responses), SAMPLES, num_tokens))
    for _ in range(2):
        start = now(setup.device)
        label_responses(pair, prompts, responses, uniform, WARP)
        taken = now(setup.device) - start
    rows.append([f"labels of {SAMPLES} drafted tokens at each position", len(responses) * num_tokens / taken])
    columns = [Column("what"), Column("tokens/s", "fixed:0")]
    yield Table("data", f"Making data with {pair.name}, responses of {num_tokens} tokens", columns, rows)
