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

from specheads.decoding.branches import ReadTexts
from specheads.decoding.engine import bulk_operations, bytes_to_pack
from specheads.decoding.stopping import MAX_TOKENS
from specheads.heads.batch import collate, sample_features
from specheads.heads.features import FEATURES
from specheads.pair.needs import memory_of, memory_parts, memory_to_read
from specheads.pair.padding import BATCH_TOKENS
from specheads.pair.pair import Pair
from specheads.pair.reading import draft_states
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
    "draft_depth",  # data sets of earlier versions have none
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
    """Rows of a data set, mixed differently in epochs that follow each other.

    Each mix, and each epoch of heads that have not read the token, takes another one of the tokens
    that were sampled at a position: a head then learns how probabilities differ between tokens
    instead of memorising one.
    """

    def __init__(
        self,
        rows: Dataset | Sequence[ResponseRow],
        predicts: str,
        response_share: float | None,
        seed: int,
        num_mixes: int | None = None,
    ) -> None:
        """Mix `rows` in `num_mixes` ways, which epochs take in turn; None: in another one in every
        epoch. For `response_share` see `checked_share`.
        """
        self.predicts = predicts
        self.seed = seed
        self.response_share = checked_share(predicts, response_share)
        # Without drafted tokens all mixes are one.
        self.num_mixes = 1 if self.response_share == 1 else num_mixes
        if isinstance(rows, Dataset):
            columns = [name for name in COLUMNS if name in rows.column_names]
            rows = rows.with_format("numpy", columns=columns)
        self.rows = rows
        self._kept: dict[int, ResponseRow] = {}
        # Of a mix and a row, where they are stored: see FeatureStore.
        self.features: Callable[[int, int], Mapping[str, Tensor]] | None = None

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
        mix = epoch if self.num_mixes is None else epoch % self.num_mixes
        uniform = np.random.default_rng([self.seed, mix, number]).random(len(response))
        kept = uniform < self.response_share
        mixed_in, _ = samples[mix % len(samples)]
        committed = np.concatenate([row["prompt_ids"], response]).astype(np.int64)
        text = committed.copy()
        text[len(row["prompt_ids"]) :] = np.where(kept, response, mixed_in)
        # The draft must have read the token for an input_token head; a next_token head needs only
        # the prefix.
        is_read = self.predicts == "input_token"
        predicted = ~kept if is_read else np.ones_like(kept)
        drafted, accept_prob = samples[(mix if is_read else epoch) % len(samples)]
        item = {
            "tokens": text,
            "index": len(row["prompt_ids"]) + np.flatnonzero(predicted),
            "drafted": drafted[predicted].astype(np.int64),
            "label": accept_prob[predicted].astype(np.float32),
        }
        if len(depth := np.asarray(row.get("draft_depth", ()))):
            item |= {"committed": committed, "depth": depth[predicted].astype(np.int64)}
        if self.features is not None:
            features = dict(self.features(mix, number))
            for name, values in features.items():
                if FEATURES[name].of_token:
                    features[name] = values[:, epoch % values.shape[1]]
            item["features"] = features
        return item


class FeatureStore(RowStore):
    """The draft's features of all mixes of the texts of some splits, in the folder of the data set.

    The draft then reads each text once, and not once per epoch.
    """

    def __init__(
        self,
        folder: Path,
        pair: Pair,
        splits: Mapping[str, MixedResponses],
        needs: frozenset[str],
    ) -> None:
        """Plan the store of the data set in `folder`: of what heads `needs`, those features that
        the feature table stores. The splits are for heads of one kind, and of counted mixes.
        """
        self.pair = pair
        self.draft = pair.draft_lm
        (self.predicts,) = {data.predicts for data in splits.values()}
        self.needs = frozenset(name for name in needs if FEATURES[name].stored)
        self.splits = splits
        texts = {}
        sizes = {}
        # Each mix of a split, by how the names of its shards begin
        self._mixes: dict[str, tuple[MixedResponses, int]] = {}
        for name, data in splits.items():
            assert data.num_mixes is not None, f"{name}: an unlimited number of mixes"
            # Their number is not among these: further mixes are further shards.
            texts[name] = [data.response_share, data.seed, len(data)]
            num_samples = len(data.sampled_tokens(0))
            row_bytes = data.lengths() * self._bytes_per_token(num_samples)
            for mix in range(data.num_mixes):
                self._mixes[_start(name, mix)] = data, mix
                sizes[_start(name, mix)] = row_bytes
        provenance = {
            "data": folder.name,
            "dtype": str(self.draft.model.dtype),
            "features": sorted(self.needs),
            "predicts": self.predicts,
            "texts": texts,
        }
        super().__init__(folder / "features", provenance, sizes, "features")

    def store(self, budget: float) -> None:
        """Give the splits stored features, unless the store is larger than a `budget` in GiB."""
        if not self.fits(budget):
            return
        with computing_with(bulk_operations(self.draft.device)):
            parts = memory_to_read(self.pair.target_lm, self.draft, MAX_TOKENS + 1)
            more = {"a shard": 2.0 * min(self.num_bytes, SHARD_BYTES)}
            if not self.draft.reads_layers:
                parts = [memory_parts(self.draft, positions=BATCH_TOKENS)]
                if self.draft.placement == "float32 on cpu":  # else there are none
                    more["packed copies"] = bytes_to_pack(self.draft)
            memory = memory_of("features", self.draft, *parts, more)
            self.fill(self._computed, memory, self._batches)
        for name, data in self.splits.items():
            data.features = partial(self._features_of, name)

    def _features_of(self, name: str, mix: int, number: int) -> dict[str, Tensor]:
        return self.row(_start(name, mix), number)

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
        data, mix = self._mixes[start]
        return row_batches(rows, [len(data[mix, row]["tokens"]) for row in rows])

    def _computed(self, start: str, rows: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return the features (n, ...) of some rows of a mix, those that depend on the token (n,
        samples).
        """
        data, mix = self._mixes[start]
        items = [data[mix, row] for row in rows]
        batch = collate(items).to(self.draft.device)
        samples = [batch.drafted]  # the text has read it, and none of the others
        if self.predicts == "next_token":
            samples = []
            for ids in zip(*(data.sampled_tokens(row) for row in rows), strict=True):
                samples.append(torch.from_numpy(np.concatenate(ids)).to(self.draft.device))
        texts = batch.read_by(self.predicts)
        if self.draft.reads_layers:
            hidden = draft_states(self.pair, texts)
        else:
            hidden = texts.at(ReadTexts.of(self.draft, batch.tokens).hidden)
        features, *others = sample_features(self.draft, hidden, self.needs, samples)
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


def _start(name: str, mix: int) -> str:
    """Return how the names of the shards of a split's mix begin."""
    return f"{name}-{mix:03d}-"
