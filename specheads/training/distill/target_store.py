"""The target's distributions along fixed responses, on disk: the most likely tokens of each, and the rest as one outcome."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specheads.pair.needs import memory_of, memory_parts
from specheads.pair.padding import BATCH_TOKENS, SLICE_ELEMENTS, batches_of_tokens, slices
from specheads.pair.pair import Pair
from specheads.pair.sampling import check_numbers
from specheads.replay.response_batch import ResponseBatch
from specheads.storage.row_store import SHARD_BYTES, Done, RowStore
from specheads.training.distill.distill_loss import most_likely

NUM_KEPT = 64  # tokens of each distribution, at 6 bytes each
FOLDER = "target_probs"

Answers = Sequence[Sequence[np.ndarray]]  # the responses to each prompt, ids (R,) each


def _fingerprint(prompts: Sequence[np.ndarray], answers: Answers) -> str:
    """Return a hash of prompts and the responses to each."""
    digest, numbers = hashlib.sha256(_bytes_of(prompts)), iter(range(sum(map(len, answers))))
    digest.update(f" {[[next(numbers) for _ in row] for row in answers]}".encode())
    digest.update(_bytes_of([response for row in answers for response in row]))
    return digest.hexdigest()[:16]


def _bytes_of(texts: Sequence[np.ndarray]) -> bytes:
    """Return the bytes of all tokens, then of the places where texts end."""
    values = np.concatenate([np.zeros(0, np.int32), *texts]).astype(np.int32)
    return values.tobytes() + np.cumsum([len(text) for text in texts], dtype=np.int64).tobytes()


class TargetStore(RowStore):
    """The distributions along all responses."""

    def __init__(self, root: Path, pair: Pair, prompts: Sequence[np.ndarray], answers: Answers, num_kept: int = NUM_KEPT) -> None:
        self.target: Any = pair.target_lm
        self.num_kept = min(num_kept, pair.target_lm.vocab_size)
        self.texts = [(prompt, response) for prompt, row in zip(prompts, answers, strict=True) for response in row]
        self.firsts = np.cumsum([0, *map(len, answers)])  # the number of each prompt's first response
        provenance = {
            "target": [pair.target_revision, str(pair.target.dtype)],
            "texts": _fingerprint(prompts, answers),
            "distribution": [1.0, self.num_kept],  # the temperature, which earlier versions had
        }
        # For each token an id and a log-probability for each that is kept, and the log-probability of the rest.
        sizes = np.array([len(response) for _, response in self.texts], dtype=np.int64) * (6 * self.num_kept + 2)
        super().__init__(root / FOLDER, provenance, {"": sizes}, "the target's distributions")

    def __getitem__(self, key: tuple[int, int]) -> Mapping[str, Tensor]:
        """Return `ids` (R, k) int32 and `log_probs` (R, k + 1) half of a prompt's response, by the numbers of both."""
        prompt, response = key
        return self.row("", int(self.firsts[prompt]) + response)

    def make(self) -> None:
        parts = memory_parts(self.target) | {"a shard": 2 * min(self.num_bytes, SHARD_BYTES)}
        self.fill(self._computed, memory_of(self.what, self.target, parts))

    def _computed(self, start: str, numbers: range, done: Done) -> list[dict[str, Tensor]]:
        rows: list[dict[str, Tensor]] = [{} for _ in numbers]
        texts = [self.texts[number] for number in numbers]
        for batch in batches_of_tokens([len(prompt) + len(response) for prompt, response in texts], BATCH_TOKENS):
            for row, tensors in zip(batch, self._distributions([texts[row] for row in batch]), strict=True):
                rows[row] = tensors
            done([numbers[row] for row in batch])
        return rows

    @torch.no_grad()
    def _distributions(self, texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[dict[str, Tensor]]:
        prompts, responses = zip(*texts, strict=True)
        hidden = ResponseBatch.of(prompts, responses, self.target.device).states(self.target)
        distributions = [
            most_likely(self.target.logits(hidden[piece]).log_softmax(dim=-1), self.num_kept)
            for piece in slices(len(hidden), self.target.vocab_size, SLICE_ELEMENTS)
        ]
        check_numbers(self.target.name, *(distribution.log_probs for distribution in distributions))
        ids = torch.cat([cast(Tensor, distribution.ids) for distribution in distributions]).int().cpu()  # most_likely sets them
        log_probs = torch.cat([distribution.log_probs for distribution in distributions]).half().cpu()
        counts = [len(response) for response in responses]
        columns = zip(ids.split(counts), log_probs.split(counts), strict=True)
        return [{"ids": row_ids, "log_probs": row_log_probs} for row_ids, row_log_probs in columns]
