"""The texts that heads learn from, the tokens that they predict there, and the draft's features of
these on disk.

Mixing (SpecDec++, section 3.3) replaces a part of the response by drafted tokens: states then come
from text like the decoder's.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from specheads.decoding.engine import bulk_operations
from specheads.heads.batch import collate, sample_features
from specheads.heads.features import FEATURES, RECORDED
from specheads.pair.language_model import LanguageModel
from specheads.pair.needs import memory_of, memory_parts
from specheads.pair.sampling import check_numbers, computing_with
from specheads.storage.row_store import SHARD_BYTES, RowStore
from specheads.training.heads.settings import checked_share
from specheads.training.loaders import Key, row_batches

COLUMNS = (
    "prompt_ids",
    "response_ids",
    "draft_ids",
    "accept_prob",
    "more_draft_ids",
    "more_accept_prob",
)
# Rows that stay in memory, about 10 KiB each: reading one takes longer than a step takes for it
MOST_KEPT = 10_000


ResponseRow = Mapping[str, Any]  # of a data set, with the columns COLUMNS


def _samples_of(row: ResponseRow) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the drafted tokens and their acceptance probabilities, (N,) each, of every sample in a
    row.
    """
    ids = [row["draft_ids"], *row["more_draft_ids"]]
    probs = [row["accept_prob"], *row["more_accept_prob"]]
    samples = []
    for drafted, accepted in zip(ids, probs, strict=True):
        samples.append((np.asarray(drafted), np.asarray(accepted)))
    return samples


class MixedResponses:
    """Rows of a data set, mixed differently in every epoch.

    Each epoch takes another one of the tokens that were sampled at a position: a head then learns
    how probabilities differ between tokens instead of memorising one.
    """

    def __init__(
        self,
        rows: Dataset | Sequence[ResponseRow],
        predicts: str,
        response_share: float | None,
        seed: int,
    ) -> None:
        """Mix `rows`; for `response_share` see `checked_share`."""
        self.predicts = predicts
        self.seed = seed
        self.response_share = checked_share(predicts, response_share)
        if isinstance(rows, Dataset):
            rows = rows.with_format("numpy", columns=list(COLUMNS))
        self.rows = rows
        self._kept: dict[int, ResponseRow] = {}
        # Of a row, where they are stored: see FeatureStore.
        self.features: Callable[[int], Mapping[str, Tensor]] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self) -> np.ndarray:
        """Return the number of tokens in each row's response (rows,)."""
        if not isinstance(self.rows, Dataset):
            return np.array([len(row["response_ids"]) for row in self.rows])
        rows = self.rows.with_format("arrow", columns=["response_ids"])[:]
        responses = rows.column(0).combine_chunks()
        return responses.value_lengths().to_numpy().astype(np.int64)

    def sampled_tokens(self, number: int) -> list[np.ndarray]:
        """Return the tokens (n,) of every sample at the positions of a row's response."""
        return [drafted.astype(np.int64) for drafted, _ in _samples_of(self.rows[number])]

    def __getitem__(self, key: Key) -> dict[str, Any]:
        epoch, number = key
        row = self._kept.get(number) or self.rows[number]
        if len(self._kept) < MOST_KEPT:
            self._kept[number] = row
        response = np.asarray(row["response_ids"])
        samples = _samples_of(row)
        drafted, accept_prob = samples[epoch % len(samples)]
        uniform = np.random.default_rng([self.seed, epoch, number]).random(len(response))
        kept = uniform < self.response_share
        text = np.concatenate([row["prompt_ids"], np.where(kept, response, drafted)])
        # The draft must have read the token for an input_token head; a next_token head needs only
        # the prefix.
        predicted = ~kept if self.predicts == "input_token" else np.ones_like(kept)
        item = {
            "tokens": text.astype(np.int64),
            "index": len(row["prompt_ids"]) + np.flatnonzero(predicted),
            "drafted": drafted[predicted].astype(np.int64),
            "label": accept_prob[predicted].astype(np.float32),
        }
        if self.features is not None:
            features = dict(self.features(number))
            for name, values in features.items():
                if FEATURES[name].of_token:
                    features[name] = values[:, epoch % values.shape[1]]
            item["features"] = features
        return item


class FeatureStore(RowStore):
    """The draft's features of splits whose texts are the responses, unmixed, in the folder of the
    data set.

    The draft then reads each text once, and not once per epoch.
    """

    def __init__(
        self,
        folder: Path,
        draft: LanguageModel,
        splits: Mapping[str, MixedResponses],
        needs: frozenset[str],
    ) -> None:
        """Plan the store of the data set in `folder`: of what heads `needs`, those features that
        the feature table stores.
        """
        self.draft = draft
        # The test compares heads with rules that need no head.
        self.needs = frozenset(name for name in needs | set(RECORDED) if FEATURES[name].stored)
        texts = {}
        sizes = {}
        self.splits: dict[str, MixedResponses] = {}  # by how the names of their shards begin
        for name, data in splits.items():
            start = f"{name}-000-"  # the number is an epoch's, of earlier versions
            self.splits[start] = data
            texts[name] = [data.response_share, data.seed, len(data)]
            num_samples = len(data.sampled_tokens(0))
            sizes[start] = data.lengths() * self._bytes_per_token(num_samples)
        provenance = {
            "data": folder.name,
            "dtype": str(draft.model.dtype),
            "features": sorted(self.needs),
            "predicts": "next_token",
            "texts": texts,
        }
        super().__init__(folder / "features", provenance, sizes, "features")

    def store(self, budget: float) -> None:
        """Give the splits stored features, unless the store is larger than a `budget` in GiB."""
        if not self.fits(budget):
            return
        with computing_with(bulk_operations(self.draft.device)):
            parts = memory_parts(self.draft) | {"a shard": 2 * min(self.num_bytes, SHARD_BYTES)}
            self.fill(self._computed, memory_of("features", self.draft, parts), self._batches)
        for start, data in self.splits.items():
            data.features = partial(self.row, start)

    def _bytes_per_token(self, num_samples: int) -> int:
        total = 0
        for name in self.needs:
            if FEATURES[name].size is not None:
                width = self.draft.output_embedding.weight.element_size()
                total += self.draft.hidden_size * width
            else:
                total += 4 * (num_samples if FEATURES[name].of_token else 1)
        return total

    def _batches(self, start: str, rows: range) -> list[list[int]]:
        return row_batches(rows, [len(self.splits[start][0, row]["tokens"]) for row in rows])

    def _computed(self, start: str, rows: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return the features (n, ...) of some rows of a split, those that depend on the token (n,
        samples).
        """
        data = self.splits[start]
        device = self.draft.device
        items = [data[0, row] for row in rows]
        samples = []
        for ids in zip(*(data.sampled_tokens(row) for row in rows), strict=True):
            samples.append(torch.from_numpy(np.concatenate(ids)).to(device))
        batch = collate(items).to(device)
        features, *others = sample_features(self.draft, batch, "next_token", self.needs, samples)
        for name, values in features.items():
            if FEATURES[name].of_token:
                of_others = [other[name] for other in others]
                features[name] = torch.stack([values, *of_others], dim=1)
        check_numbers(self.draft.name, *features.values())
        counts = [len(item["index"]) for item in items]
        computed: list[dict[str, Tensor]] = [{} for _ in rows]
        for name, values in features.items():
            for row, part in zip(computed, values.cpu().split(counts), strict=True):
                row[name] = part
        return computed
