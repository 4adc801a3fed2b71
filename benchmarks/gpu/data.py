"""How many tokens per second do the target's responses and their labels take?

    python -m benchmarks.gpu.data [--device cuda] [--tiny]

The pair has the shapes of Llama 3.1 8B and Llama 3.2 1B and random weights; prompts are random tokens. No response ends early.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.build_pairs import made_up_prompts, pair_of
from benchmarks.gpu.script import Part, Setup, run_script
from benchmarks.steps import now
from data_gen.labels import label_responses
from specheads import Warp
from specheads.decoding.responses import Responder
from specheads.pair import Pair
from specheads.prompts.encoding import ResponseLimits

WARP = Warp(1.0, top_k=50)
ROWS = (1, 16, 64)  # responses that are written together
PROMPT_TOKENS, NEW_TOKENS = 128, 128
LABELLED = 64  # responses, of NEW_TOKENS tokens each
SAMPLES = 2  # drafted tokens that are labelled at each position


class Data:
    """One pair, and prompts for it."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.pair = setup, pair_of(setup)
        self.rows = ROWS[:1] if setup.tiny else ROWS
        self.num_tokens = 8 if setup.tiny else NEW_TOKENS
        count = 2 if setup.tiny else LABELLED
        self.prompts = made_up_prompts(self.pair, count, 8 if setup.tiny else PROMPT_TOKENS)

    def parts(self) -> list[Part]:
        """Return what is measured."""
        return [self.labels, self.responses]

    def labels(self) -> dict[str, Any]:
        """Time the labels of responses, after a pass that is not timed."""
        responses = made_up_prompts(self.pair, len(self.prompts), self.num_tokens)
        uniform = np.random.default_rng(0).random((len(responses), SAMPLES, self.num_tokens))
        taken = []
        for _ in range(2):
            start = now(self.setup.device)
            label_responses(self.pair, self.prompts, responses, uniform, WARP)
            taken.append(now(self.setup.device) - start)
        num_tokens = len(responses) * self.num_tokens
        return {"labelled_tokens": num_tokens, "tokens_per_second": num_tokens / taken[-1], "first_pass_seconds": taken[0]}

    def responses(self) -> dict[str, Any]:
        """Time the target's responses, one at a time and in rows."""
        return {"rows": [self._responses_in(count) for count in self.rows]}

    def _responses_in(self, num_rows: int) -> dict[str, Any]:
        """Return the speed of responses written in `num_rows` rows; the first ones are not timed."""
        prompts = self.prompts[:num_rows]
        made = timed_responses(self.pair, prompts, self.num_tokens, num_rows, self.setup)
        return {"rows": num_rows, "new_tokens": self.num_tokens} | made


def timed_responses(pair: Pair, prompts: list[list[int]], num_tokens: int, num_rows: int, setup: Setup) -> dict[str, float]:
    """Return the tokens per second of the responses to `prompts`, and the seconds of getting ready."""
    limits = ResponseLimits(num_tokens, batch_size=num_rows)
    responder = Responder(pair, [len(prompt) for prompt in prompts], limits, engine=setup.engine)
    uniform = np.random.default_rng(1).random((len(prompts), num_tokens))
    start = now(setup.device)
    responder.respond(prompts, uniform, WARP)
    ready = now(setup.device)
    made = responder.respond(prompts, uniform, WARP)
    taken = now(setup.device) - ready
    return {"tokens_per_second": sum(len(response.ids) for response in made) / taken, "first_pass_seconds": ready - start}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return the exit code."""
    with torch.no_grad():
        return run_script("data", __doc__, lambda setup: Data(setup).parts(), argv)


if __name__ == "__main__":
    raise SystemExit(main())
