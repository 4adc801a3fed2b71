"""The draft's own responses to the prompts of the next steps, in batches: what it writes now is what it will be asked to get right.

What is drawn depends on (seed, epoch, prompt) and the draft's weights alone. The responses at hand are part of a checkpoint, for the
weights that wrote them are gone when a run is resumed.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.responses import generate_batch
from specheads.padding import batches_of_rows
from specheads.pair import Pair
from specheads.sampling import Warp
from specheads.training.distill.samples import Ragged, Sample

logger = logging.getLogger(__name__)


class DraftResponses:
    """Responses of the draft by (epoch, prompt), for one stretch of steps at a time."""

    def __init__(self, pair: Pair, warp: Warp, max_new_tokens: int, batch_size: int, seed: int) -> None:
        """`warp` is decoding's; a greedy draft would always write the same, so it samples at temperature 1."""
        self.pair, self.max_new_tokens, self.batch_size, self.seed = pair, max_new_tokens, batch_size, seed
        self.warp = replace(warp, temperature=1.0) if warp.greedy else warp
        self.found: dict[tuple[int, int], np.ndarray] = {}
        self.told = False

    def answered(self, samples: Sequence[Sample], upcoming: Callable[[], Sequence[Sample]]) -> list[Sample]:
        """Return `samples` with responses; where one is not there yet, the draft writes all that `upcoming` gives, these among them."""
        if any(sample.response is None and sample.key not in self.found for sample in samples):
            self.write(upcoming())
        return [replace(sample, response=self.found[sample.key]) if sample.response is None else sample for sample in samples]

    @torch.no_grad()
    def write(self, samples: Sequence[Sample]) -> None:
        """Let the draft answer, and forget what it wrote before."""
        start, model = time.perf_counter(), self.pair.draft
        was_training = model.training
        model.eval()
        self.found = {}
        for rows in batches_of_rows([len(sample.prompt) for sample in samples], self.batch_size):
            some = [samples[row] for row in rows]
            uniform = np.stack(
                [np.random.default_rng([self.seed, *sample.key, 3]).random(self.max_new_tokens) for sample in some]
            )
            prompts = [sample.prompt.tolist() for sample in some]
            made = generate_batch(self.pair, prompts, uniform, self.warp, self.max_new_tokens, lm=self.pair.draft_lm)
            self.found |= {sample.key: np.array(one.ids, dtype=np.int32) for sample, one in zip(some, made, strict=True)}
        model.train(was_training)
        if not self.told:
            self.told = True
            tokens, seconds = sum(map(len, self.found.values())), time.perf_counter() - start
            logger.info("on-policy: the draft wrote %d responses, %d tokens, in %.1f s", len(samples), tokens, seconds)

    def state(self) -> dict[str, Tensor]:
        """Return the responses at hand, for a checkpoint."""
        tokens = Ragged(list(self.found.values()))
        keys = torch.tensor(list(self.found), dtype=torch.long).reshape(-1, 2)
        return {"keys": keys, "tokens": torch.from_numpy(tokens.values.copy()), "ends": torch.from_numpy(tokens.ends.copy())}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take up the responses of a checkpoint."""
        texts = np.split(state["tokens"].numpy(), state["ends"].numpy()[:-1]) if len(state["ends"]) else []
        self.found = {tuple(key): text for key, text in zip(state["keys"].tolist(), texts, strict=True)}
