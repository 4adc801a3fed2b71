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
from torch import Tensor
from torch.utils.data import Dataset

from specheads.decoding.engine import bulk_operations
from specheads.heads.batch import collate, sample_features
from specheads.heads.features import FEATURES, RECORDED
from specheads.pair.language_model import LanguageModel
from specheads.pair.needs import memory_of, memory_parts
from specheads.pair.padding import BATCH_TOKENS, batches_of_tokens
from specheads.pair.sampling import check_numbers, computing_with
from specheads.storage.row_store import SHARD_BYTES, RowStore
from specheads.training.heads.settings import checked_share

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


def _samples_of(row: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the drafted tokens and their acceptance probabilities, (N,) each, of every sample in a
    row.
    """
    ids, probs = ([row[name], *row[f"more_{name}"]] for name in ("draft_ids", "accept_prob"))
    return [
        (np.asarray(drafted), np.asarray(accepted))
        for drafted, accepted in zip(ids, probs, strict=True)
    ]


class MixedResponses(Dataset):
    """Rows of a data set, mixed differently in every epoch.

    Each epoch takes another one of the tokens that were sampled at a position: a head then learns
    how probabilities differ between tokens instead of memorising one.
    """

    def __init__(self, rows: Any, predicts: str, response_share: float | None, seed: int) -> None:
        """Mix `rows` (a `datasets.Dataset`, or dicts of its columns).

        For `response_share` see `checked_share`.
        """
        self.predicts = predicts
        self.seed = seed
        self.response_share = checked_share(predicts, response_share)
        self.rows = (
            rows.with_format("numpy", columns=list(COLUMNS))
            if hasattr(rows, "with_format")
            else rows
        )
        self._kept: dict[int, Mapping[str, Any]] = {}
        self.features: Callable[[int], dict[str, Tensor]] | None = (
            None  # of a row, where they are stored: see FeatureStore
        )

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self) -> np.ndarray:
        """Return the number of tokens in each row's response (rows,)."""
        if not hasattr(self.rows, "with_format"):
            return np.array([len(row["response_ids"]) for row in self.rows])
        responses = (
            self.rows.with_format("arrow", columns=["response_ids"])[:].column(0).combine_chunks()
        )
        return responses.value_lengths().to_numpy().astype(np.int64)

    def sampled_tokens(self, number: int) -> list[np.ndarray]:
        """Return the tokens (n,) of every sample at the positions of a row's response."""
        return [drafted.astype(np.int64) for drafted, _ in _samples_of(self.rows[number])]

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, number = key
        row = self._kept.get(number) or self.rows[number]
        if len(self._kept) < MOST_KEPT:
            self._kept[number] = row
        response = np.asarray(row["response_ids"])
        samples = _samples_of(row)
        drafted, accept_prob = samples[epoch % len(samples)]
        kept = (
            np.random.default_rng([self.seed, epoch, number]).random(len(response))
            < self.response_share
        )
        # The draft must have read the token for an input_token head; a next_token head needs only
        # the prefix.
        predicted = ~kept if self.predicts == "input_token" else np.ones_like(kept)
        item = {
            "tokens": (
                np.concatenate([row["prompt_ids"], np.where(kept, response, drafted)]).astype(
                    np.int64
                )
            ),
            "index": len(row["prompt_ids"]) + np.flatnonzero(predicted),
            "drafted": drafted[predicted].astype(np.int64),
            "label": accept_prob[predicted].astype(np.float32),
        }
        if self.features is not None:
            stored = self.features(number).items()
            item["features"] = {
                name: each[:, epoch % each.shape[1]] if FEATURES[name].of_token else each
                for name, each in stored
            }
        return item


class FeatureStore:
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
        self.splits = splits
        # The test compares heads with rules that need no head.
        self.needs = frozenset(name for name in needs | set(RECORDED) if FEATURES[name].stored)
        provenance = {
            "data": folder.name,
            "dtype": str(draft.model.dtype),
            "features": sorted(self.needs),
            "predicts": "next_token",
            "texts": {
                name: [data.response_share, data.seed, len(data)] for name, data in splits.items()
            },
        }
        bytes_per_token = sum(map(self._bytes_of_feature, self.needs))
        # By how the names of a split's shards begin; the number is an epoch's, of earlier versions.
        self.by_start = {f"{name}-000-": data for name, data in splits.items()}
        sizes = {start: data.lengths() * bytes_per_token for start, data in self.by_start.items()}
        self.rows = RowStore(folder / "features", provenance, sizes, "features")

    def stored(self, budget: float) -> Mapping[str, MixedResponses]:
        """Return the splits with stored features.

        As they are if the store is larger than a `budget` in GiB.
        """
        if not self.rows.fits(budget):
            return self.splits
        with computing_with(bulk_operations(self.draft.device)):
            parts = memory_parts(self.draft) | {
                "a shard": 2 * min(self.rows.num_bytes, SHARD_BYTES)
            }
            self.rows.fill(self._computed, memory_of("features", self.draft, parts), self._batches)
        for start, data in self.by_start.items():
            data.features = partial(self.rows.row, start)
        return self.splits

    def _bytes_of_feature(self, name: str) -> int:
        if FEATURES[name].size is not None:
            return self.draft.hidden_size * self.draft.output_embedding.weight.element_size()
        return 4 * (
            max(len(data.sampled_tokens(0)) for data in self.splits.values())
            if FEATURES[name].of_token
            else 1
        )

    def _batches(self, start: str, rows: range) -> list[list[int]]:
        lengths = [len(self.by_start[start][0, row]["tokens"]) for row in rows]
        return [
            [rows[place] for place in places] for places in batches_of_tokens(lengths, BATCH_TOKENS)
        ]

    def _computed(self, start: str, rows: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return the features (n, ...) of some rows of a split, those that depend on the token (n,
        samples).
        """
        data = self.by_start[start]
        items = [data[0, row] for row in rows]
        sampled = [data.sampled_tokens(row) for row in rows]
        batch = collate(items).to(self.draft.device)
        samples = [
            torch.from_numpy(np.concatenate(ids)).to(self.draft.device)
            for ids in zip(*sampled, strict=True)
        ]
        features, *others = sample_features(self.draft, batch, "next_token", self.needs, samples)
        for name in features:
            if FEATURES[name].of_token:
                features[name] = torch.stack(
                    [features[name], *(other[name] for other in others)], dim=1
                )
        check_numbers(self.draft.name, *features.values())
        counts = [len(item["index"]) for item in items]
        columns = {name: values.cpu().split(counts) for name, values in features.items()}
        return [
            {name: values[place] for name, values in columns.items()} for place in range(len(rows))
        ]
