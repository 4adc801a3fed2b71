"""The draft's own responses to the prompts of the next steps, in batches: on-policy samples.

A response depends on (seed, epoch, prompt) and the draft's weights alone. The present responses are part of a checkpoint, because
a resumed run no longer has the weights that wrote them.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.responses import Responder
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import ResponseLimits
from specheads.training.distill.samples import Sample

logger = logging.getLogger(__name__)


class DraftResponses:
    """Responses of the draft by (epoch, prompt), for the samples of a few steps at a time.

    Every process writes those that it reads, and all processes write at the same steps: `covered` are the samples of all
    processes that have responses somewhere.
    """

    def __init__(self, pair: Pair, warp: Warp, limits: ResponseLimits, seed: int) -> None:
        """Sample with the warp of decoding; a greedy draft would always write the same, so it samples at temperature 1."""
        self.pair, self.limits, self.seed = pair, limits, seed
        self.warp = replace(warp, temperature=1.0) if warp.greedy else warp
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
        lengths = [len(sample.prompt) for sample in samples]
        # Weights change from call to call: code that was compiled for them, and packed copies, would be made for one call.
        responder = Responder(self.pair, lengths, self.limits, self.pair.draft_lm, engine="eager")
        most = self.limits.max_new_tokens
        uniform = np.stack([np.random.default_rng([self.seed, *sample.key, 3]).random(most) for sample in samples])
        responses = responder.respond([sample.prompt.tolist() for sample in samples], uniform, self.warp)
        keys = [sample.key for sample in samples]
        self.responses = {key: np.array(each.ids, dtype=np.int32) for key, each in zip(keys, responses, strict=True)}
        model.train(was_training)
        if not self.announced:
            self.announced = True
            tokens, seconds = sum(map(len, self.responses.values())), time.perf_counter() - start
            logger.info("on-policy: the draft wrote %d responses, %d tokens, in %.1f s", len(samples), tokens, seconds)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the responses of a checkpoint, those of all processes."""
        texts = np.split(state["tokens"].numpy(), state["ends"].numpy()[:-1]) if len(state["ends"]) else []
        self.responses = {(epoch, row): text for (epoch, row), text in zip(state["keys"].tolist(), texts, strict=True)}
        self.covered = set(self.responses)


def state_of(responses: Mapping[tuple[int, int], np.ndarray]) -> dict[str, Tensor]:
    """Return responses by (epoch, prompt) for a checkpoint: their keys, all tokens, and where each ends."""
    tokens = np.concatenate([np.zeros(0, np.int32), *responses.values()])
    return {
        "keys": torch.tensor(list(responses), dtype=torch.long).reshape(-1, 2),
        "tokens": torch.from_numpy(tokens),
        "ends": torch.tensor([len(text) for text in responses.values()], dtype=torch.long).cumsum(0),
    }
