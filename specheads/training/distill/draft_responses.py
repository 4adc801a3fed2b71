"""The draft's own responses to the prompts of the next steps, in batches: on-policy samples.

A response depends on (seed, epoch, prompt) and the draft's weights alone. The present responses are part of a checkpoint, because
a resumed run no longer has the weights that wrote them.
"""

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
        model = self.pair.draft
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

    def load(self, responses: Mapping[tuple[int, int], Tensor]) -> None:
        """Restore the responses of a checkpoint, those of all processes."""
        self.responses = {key: ids.numpy() for key, ids in responses.items()}
        self.covered = set(responses)
