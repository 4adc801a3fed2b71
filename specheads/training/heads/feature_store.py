"""The draft's features of a data set, in its folder, so that the draft reads each text once and not once per epoch."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specheads.decoding.engine import bulk_operations
from specheads.heads.batch import HeadBatch, collate, sample_features
from specheads.heads.features import FEATURES, RECORDED
from specheads.pair.language_model import LanguageModel
from specheads.pair.needs import memory_of, memory_parts
from specheads.pair.padding import BATCH_TOKENS, batches_of_tokens
from specheads.pair.sampling import check_numbers, computing_with
from specheads.storage.row_store import SHARD_BYTES, Done, RowStore
from specheads.training.heads.mixed_responses import MixedResponses


class FeatureStore:
    """The features of splits whose texts are the responses, unmixed: those that look-ahead heads need."""

    def __init__(self, folder: Path, draft: LanguageModel, splits: Mapping[str, MixedResponses], needs: frozenset[str]) -> None:
        """Plan the store of the data set in `folder`: of what heads `needs`, those features that the feature table stores."""
        self.draft, self.splits = draft, splits
        # The test compares heads with rules that need no head.
        self.needs = frozenset(name for name in needs | set(RECORDED) if FEATURES[name].stored)
        provenance = {
            "data": folder.name,
            "dtype": str(draft.model.dtype),
            "features": sorted(self.needs),
            "predicts": "next_token",
            "texts": {name: [data.response_share, data.seed, len(data)] for name, data in splits.items()},
        }
        bytes_per_token = sum(map(self._bytes_of_feature, self.needs))
        sizes = {_start(name): data.lengths() * bytes_per_token for name, data in splits.items()}
        self.rows = RowStore(folder / "features", provenance, sizes, "features")

    def stored(self, budget: float) -> Mapping[str, MixedResponses]:
        """Return the splits with stored features; as they are if the store is larger than a `budget` in GiB."""
        if not self.rows.fits(budget):
            return self.splits
        with computing_with(bulk_operations(self.draft.device)):
            parts = memory_parts(self.draft) | {"a shard": 2 * min(self.rows.num_bytes, SHARD_BYTES)}
            self.rows.fill(self._computed, memory_of("features", self.draft, parts))
        for name, data in self.splits.items():
            data.features = partial(self.rows.row, _start(name))
        return self.splits

    def _bytes_of_feature(self, name: str) -> int:
        if FEATURES[name].size is not None:
            return self.draft.hidden_size * self.draft.output_embedding.weight.element_size()
        return 4 * (max(len(data.sampled_tokens(0)) for data in self.splits.values()) if FEATURES[name].of_token else 1)

    def _computed(self, start: str, numbers: range, done: Done) -> list[dict[str, Tensor]]:
        """Return the features (n, ...) of some rows of a split, those that depend on the token (n, samples)."""
        data = next(data for name, data in self.splits.items() if _start(name) == start)
        items = [data[0, number] for number in numbers]
        rows: list[dict[str, Tensor]] = [{} for _ in items]
        # Rows of similar length are read together; their features are put back in order.
        for places in batches_of_tokens([len(item["tokens"]) for item in items], BATCH_TOKENS):
            batch = collate([items[place] for place in places]).to(self.draft.device)
            samples = [[torch.from_numpy(ids) for ids in data.sampled_tokens(numbers[place])] for place in places]
            merged = [torch.cat(ids).to(self.draft.device) for ids in zip(*samples, strict=True)]
            counts = [len(items[place]["index"]) for place in places]
            for name, values in self._features(batch, merged).items():
                check_numbers(self.draft.name, values)
                for place, value in zip(places, values.cpu().split(counts), strict=True):
                    rows[place][name] = value
            done([numbers[place] for place in places])
        return rows

    def _features(self, batch: HeadBatch, samples: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the features of a batch to store, with `samples` of its drafted tokens (n,)."""
        features, *others = sample_features(self.draft, batch, "next_token", self.needs, samples)
        for name in features:
            if FEATURES[name].of_token:
                features[name] = torch.stack([features[name], *(other[name] for other in others)], dim=1)
        return features


def _start(split: str) -> str:
    """Return how the names of a split's shards begin; the number is an epoch's, of earlier versions."""
    return f"{split}-000-"
