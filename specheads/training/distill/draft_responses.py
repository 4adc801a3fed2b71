"""The draft's own responses to the prompts of the next steps, in batches: on-policy samples.

A response depends on (seed, epoch, prompt) and the draft's weights alone. The present responses are part of a checkpoint, because
a resumed run no longer has the weights that wrote them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.responses import Responder
from specheads.pair.pair import Pair
from specheads.prompts.prompt import ResponseLimits
from specheads.training.distill.samples import Ragged, Sample
from specheads.training.distill.settings import Distillation

logger = logging.getLogger(__name__)


class DraftResponses:
    """Responses of the draft by (epoch, prompt), for the samples of a few steps at a time.

    Every process writes those that it reads, and all processes write at the same steps: `covered` are the samples of all
    processes that have responses somewhere.
    """

    def __init__(self, pair: Pair, settings: Distillation, max_new_tokens: int) -> None:
        """Sample with the warp of decoding; a greedy draft would always write the same, so it samples at temperature 1."""
        self.pair, self.settings, self.max_new_tokens = pair, settings, max_new_tokens
        self.warp = replace(settings.warp, temperature=1.0) if settings.warp.greedy else settings.warp
        self.responses: dict[tuple[int, int], np.ndarray] = {}
        self.covered: set[tuple[int, int]] = set()
        self.announced = False

    def refresh(self, batch: Sequence[Sample], upcoming: Callable[[], tuple[Sequence[Sample], Sequence[Sample]]]) -> None:
        """Let the draft write if a sample of a step has no response yet.

        Args:
            batch: the samples of the step, those of all processes, that the draft responds to.
            upcoming: returns those of the next steps of all processes, and those among them that this process reads.
        """
        if all(sample.key in self.covered for sample in batch):
            return
        everywhere, here = upcoming()
        self.covered = {sample.key for sample in everywhere}
        self.responses = {}
        if here:
            self.write(here)

    def answered(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return `samples` with responses."""
        return [replace(sample, response=self.responses[sample.key]) if sample.response is None else sample for sample in samples]

    @torch.no_grad()
    def write(self, samples: Sequence[Sample]) -> None:
        """Let the draft respond to `samples`, and forget the responses that it wrote before."""
        start, model = time.perf_counter(), self.pair.draft
        was_training = model.training
        model.eval()
        self.responses = {}
        limits = ResponseLimits(self.max_new_tokens)
        lengths = [len(sample.prompt) for sample in samples]
        # Weights change from call to call: code that was compiled for them, and packed copies, would be made for one call.
        responder = Responder(self.pair, lengths, limits, self.pair.draft_lm, engine="eager")
        uniform = np.stack([self._uniforms(sample) for sample in samples])
        responses = responder.respond([sample.prompt.tolist() for sample in samples], uniform, self.warp)
        for sample, response in zip(samples, responses, strict=True):
            self.responses[sample.key] = np.array(response.ids, dtype=np.int32)
        model.train(was_training)
        if not self.announced:
            self.announced = True
            tokens, seconds = sum(map(len, self.responses.values())), time.perf_counter() - start
            logger.info("on-policy: the draft wrote %d responses, %d tokens, in %.1f s", len(samples), tokens, seconds)

    def _uniforms(self, sample: Sample) -> np.ndarray:
        """Return the numbers (max_new_tokens,) of a sample's response."""
        return np.random.default_rng([self.settings.seed, *sample.key, 3]).random(self.max_new_tokens)

    def state(self) -> dict[str, Tensor]:
        """Return the present responses, for a checkpoint."""
        tokens = Ragged(list(self.responses.values()))
        keys = torch.tensor(list(self.responses), dtype=torch.long).reshape(-1, 2)
        return {"keys": keys, "tokens": torch.from_numpy(tokens.values.copy()), "ends": torch.from_numpy(tokens.ends.copy())}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the responses of a checkpoint, those of all processes."""
        texts = np.split(state["tokens"].numpy(), state["ends"].numpy()[:-1]) if len(state["ends"]) else []
        self.responses = {(epoch, row): text for (epoch, row), text in zip(state["keys"].tolist(), texts, strict=True)}
        self.covered = set(self.responses)


def merged(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the state of all processes from those of each."""
    return {
        "keys": torch.cat([state["keys"] for state in states]),
        "tokens": torch.cat([state["tokens"] for state in states]),
        "ends": torch.cat([state["ends"].diff(prepend=state["ends"].new_zeros(1)) for state in states]).cumsum(0),
    }
