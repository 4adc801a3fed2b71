"""The target's distributions along fixed responses, on disk: the most likely tokens of each, and the probability of the rest.

A draft is compared with them on those tokens, and on all other tokens as one outcome.
"""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specheads.errors import UserError
from specheads.pair.padding import BATCH_TOKENS, SLICE_ELEMENTS, batches_of_tokens, slices
from specheads.pair.pair import Pair
from specheads.pair.sampling import check_numbers
from specheads.replay.response_batch import ResponseBatch
from specheads.storage.shards import fingerprint
from specheads.storage.tensor_shards import GIB, ShardReader, make_missing, packed, spans
from specheads.training.distill.distill_loss import most_likely
from specheads.training.distill.samples import Ragged, Responses
from specheads.training.distill.settings import DistillLoss, TargetStorage

FOLDER = "target_probs"


def texts_fingerprint(prompts: Ragged, responses: Mapping[str, Responses]) -> str:
    """Return a hash of prompts and their responses from before training, by kind."""
    digest = hashlib.sha256(prompts.values.tobytes() + prompts.ends.tobytes())
    for kind, known in responses.items():
        digest.update(f"{kind} {[list(numbers) for numbers in known.of_prompt]}".encode())
        digest.update(known.tokens.values.tobytes() + known.tokens.ends.tobytes())
    return digest.hexdigest()[:16]


class TargetStore:
    """The distributions along all responses of one kind."""

    def __init__(self, root: Path, pair: Pair, prompts: Ragged, responses: Responses, loss: DistillLoss, top_k: int) -> None:
        """Plan the store in a folder below `root`; `top_k` tokens of each distribution are kept."""
        self.target, self.prompts, self.responses, self.loss = pair.target_lm, prompts, responses, loss
        self.num_kept = min(top_k, self.target.vocab_size)
        self.prompt_of = np.zeros(len(responses.tokens), dtype=np.int64)
        for row, numbers in enumerate(responses.of_prompt):
            self.prompt_of[list(numbers)] = row
        self.provenance = {
            "target": [pair.target_id, pair.target_revision, str(pair.target.dtype)],
            "texts": texts_fingerprint(prompts, {"": responses}),
            "distribution": [loss.temperature, self.num_kept],
        }
        self.root, self.folder = root, root / FOLDER / fingerprint(self.provenance)
        self.parts = {f"{first:08d}.safetensors": (first, count) for first, count in spans(self.sizes)}
        self.firsts = np.array([first for first, _ in self.parts.values()])
        self.reader = ShardReader(self.folder)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"target": None}  # a loader's process reads the store, and does not make it

    @property
    def text_lengths(self) -> np.ndarray:
        """Tokens of each response with its prompt."""
        return self.prompts.lengths[self.prompt_of] + self.responses.tokens.lengths

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of each response; per position, an id and a log-probability for each kept token, and one log-probability."""
        return self.responses.tokens.lengths * (6 * self.num_kept + 2)

    def bytes(self) -> int:
        """Return the size of the whole store."""
        return int(self.sizes.sum())

    def fits(self, storage: TargetStorage) -> bool:
        """Return whether the distributions may be kept: they fit the budget and the disk.

        Raises:
            UserError: `cached`, but they do not fit the budget or the disk.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        size, free = self.bytes() / GIB, shutil.disk_usage(self.root).free / GIB
        present = sum(path.stat().st_size for path in self.folder.glob("*.safetensors")) / GIB
        fits = size <= storage.budget and size - present <= free
        if storage.keep == "cached" and not fits:
            raise UserError(
                f"target_probs.keep=cached would take {size:.1f} GiB, but target_probs.budget={storage.budget:g} and {self.root} "
                f"has {free:.1f} GiB free; raise the budget, keep fewer tokens (target_probs.top_k), or use "
                "target_probs.keep=recomputed."
            )
        return fits and storage.keep != "recomputed"

    def is_wanted(self, storage: TargetStorage, num_reads: float, target_leaves: bool = False) -> bool:
        """Return whether to keep the distributions: `auto` does if they are read again, or if the target leaves its device.

        Raises:
            UserError: see `fits`.
        """
        return self.fits(storage) and (storage.keep == "cached" or target_leaves or num_reads > 1)

    def make(self) -> None:
        """Compute what is missing."""
        num_rows = {name: count for name, (_, count) in self.parts.items()}
        make_missing(self.folder, self.provenance, num_rows, self._computed, "the target's distributions", self.bytes() / GIB)

    def _computed(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a shard."""
        first, count = self.parts[name]
        numbers = range(first, first + count)
        rows: list[dict[str, Tensor]] = [{} for _ in numbers]
        prompts = [self.prompts[self.prompt_of[number]] for number in numbers]
        responses = [self.responses.tokens[number] for number in numbers]
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        for batch in batches_of_tokens(lengths, BATCH_TOKENS):
            computed = self._distributions([prompts[row] for row in batch], [responses[row] for row in batch])
            for row, tensors in zip(batch, computed, strict=True):
                rows[row] = tensors
        return packed(rows)

    @torch.no_grad()
    def _distributions(self, prompts: list[np.ndarray], responses: list[np.ndarray]) -> list[dict[str, Tensor]]:
        """Return `ids` and `log_probs` of each of some responses, which the target reads together."""
        hidden = ResponseBatch.of(prompts, responses, self.target.device).states(self.target)
        distributions = [
            most_likely((self.target.logits(hidden[piece]) / self.loss.temperature).log_softmax(dim=-1), self.num_kept)
            for piece in slices(len(hidden), self.target.vocab_size, SLICE_ELEMENTS)
        ]
        check_numbers(self.target.name, *(distribution.log_probs for distribution in distributions))
        ids = torch.cat([cast(Tensor, distribution.ids) for distribution in distributions]).int().cpu()  # most_likely sets them
        log_probs = torch.cat([distribution.log_probs for distribution in distributions]).half().cpu()
        counts = [len(response) for response in responses]
        columns = zip(ids.split(counts), log_probs.split(counts), strict=True)
        return [{"ids": row_ids, "log_probs": row_log_probs} for row_ids, row_log_probs in columns]

    def __getitem__(self, number: int) -> Mapping[str, Tensor]:
        """Return `ids` (R, k) int32 and `log_probs` (R, k + 1) half of a response."""
        place = int(np.searchsorted(self.firsts, number, side="right")) - 1
        first = int(self.firsts[place])
        return self.reader.row(f"{first:08d}.safetensors", number - first)
