"""The draft's features of a whole data set on disk, so that the draft reads each text once and not once per epoch.

They are in `features/<fingerprint>/` in the data set's folder: shards of safetensors with checksums, mapped into memory when they
are read. A shard appears by rename; a restart makes the missing ones.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from specheads.errors import UserError
from specheads.heads.batch import HeadBatch, collate, sample_features, target_states
from specheads.heads.features import FEATURES, RECORDED, ROUND_INPUTS
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import BATCH_TOKENS, batches_of_tokens
from specheads.pair.sampling import check_numbers
from specheads.storage.shards import fingerprint
from specheads.storage.tensor_shards import GIB, ShardReader, make_missing, packed, spans
from specheads.training.heads.mixed_responses import MixedResponses

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    """Rows `first` to `first + count` of a split, with their texts of one epoch (0 where texts do not change between epochs)."""

    split: str
    epoch: int
    first: int
    count: int

    @property
    def name(self) -> str:
        """The file name of the shard."""
        return f"{self.split}-{self.epoch:03d}-{self.first:08d}.safetensors"


class FeatureStore:
    """The features that heads of one kind need of the splits `train` and `dev`."""

    def __init__(
        self,
        folder: Path,
        lm: LanguageModel,
        splits: Mapping[str, MixedResponses],
        needs: frozenset[str],
        num_epochs: int,
        target: LanguageModel | None = None,
    ) -> None:
        """Plan the store of the data set in `folder`.

        Args:
            lm: the draft.
            splits: the texts that heads of one kind are trained on.
            needs: features that the heads read; those that the feature table does not store are left out.
            num_epochs: of training; texts that are mixed again for each epoch are stored for each.
            target: the target, if heads read its states.
        """
        self.lm, self.splits, self.target = lm, splits, target
        any_split = next(iter(splits.values()))
        self.predicts = any_split.predicts
        # The test compares look-ahead heads with rules that need no head.
        names = needs | set(RECORDED) if self.predicts == "next_token" else needs
        self.needs = frozenset(name for name in names if FEATURES[name].stored)
        self.epochs = {name: range(num_epochs if data.varies and name == "train" else 1) for name, data in splits.items()}
        self.provenance = {
            "data": folder.name,
            "dtype": [None if each is None else str(each.model.dtype) for each in (target, lm)],
            "features": sorted(self.needs),
            "predicts": self.predicts,
            "texts": {name: [data.response_share, data.seed, len(data)] for name, data in splits.items()},
        }
        self.cache, self.folder = folder, folder / "features" / fingerprint(self.provenance)
        self.lengths = {name: data.lengths() for name, data in splits.items()}

    @property
    def _target(self) -> LanguageModel:
        if self.target is None:
            raise ValueError("heads read the target's states, so the store needs the target")
        return self.target

    @property
    def bytes_per_token(self) -> int:
        """Bytes per drafted token."""
        return sum(map(self._bytes_of_feature, self.needs))

    def _bytes_of_feature(self, name: str) -> int:
        feature = FEATURES[name]
        if feature.size is not None:
            model = self._target if feature.reads_target else self.lm
            return model.hidden_size * model.output_embedding.weight.element_size()
        return 4 * (max(data.num_samples for data in self.splits.values()) if feature.of_token else 1)

    def bytes(self) -> int:
        """Return the size of the whole store, at most."""
        return sum(map(self.bytes_of, self.parts()))

    def bytes_of(self, part: _Part) -> int:
        """Return the size of a shard, at most."""
        return self.bytes_per_token * int(self.lengths[part.split][part.first : part.first + part.count].sum())

    def parts(self) -> Iterator[_Part]:
        """Yield the shards."""
        for split, epochs in self.epochs.items():
            for epoch in epochs:
                for first, count in spans(self.lengths[split] * self.bytes_per_token):
                    yield _Part(split, epoch, first, count)

    def splits_by(self, features: str, budget_gib: float) -> "dict[str, MixedResponses | StoredResponses]":
        """Return the splits, with stored features if `features` (auto, cached or online) asks for them; makes missing shards.

        `auto` stores them where the texts do not change between epochs and the store is within `budget_gib` and fits on the disk.

        Raises:
            UserError: `cached`, but the store would be larger than the budget or the disk.
        """
        size, free = self.bytes() / GIB, shutil.disk_usage(self.cache).free / GIB
        missing = sum(self.bytes_of(part) for part in self.parts() if not (self.folder / part.name).exists()) / GIB
        if features == "auto":
            fits = size <= budget_gib and missing <= free and not any(data.varies for data in self.splits.values())
            features = "cached" if fits else "online"
        if features == "online":
            return dict(self.splits)
        if size > budget_gib:
            raise UserError(
                f"features=cached would take {size:.1f} GiB, but features_budget={budget_gib:g}; raise it, use features=online, "
                "or fewer prompts (data.num_train) or, if each epoch mixes texts again, fewer epochs (trainer.max_epochs)."
            )
        if missing > free:
            raise UserError(
                f"features=cached would take {missing:.1f} GiB more, but {self.cache} has {free:.1f} GiB free; use "
                "features=online."
            )
        self.make()
        return {name: StoredResponses(data, self, name) for name, data in self.splits.items()}

    def make(self) -> None:
        """Compute the shards that are missing."""
        parts = {part.name: part for part in self.parts()}
        num_rows = {name: part.count for name, part in parts.items()}
        make_missing(
            self.folder, self.provenance, num_rows, lambda name: self._computed(parts[name]), "features", self.bytes() / GIB
        )

    def _computed(self, part: _Part) -> dict[str, Tensor]:
        """Return the tensors of a shard: features (n, ...), those that depend on the token (n, samples)."""
        data = self.splits[part.split]
        items = [data[part.epoch, number] for number in range(part.first, part.first + part.count)]
        # Rows of similar length are read together; their features are put back in order.
        lengths = [len(item["tokens"]) for item in items]
        rows: list[dict[str, Tensor]] = [{} for _ in items]
        for numbers in batches_of_tokens(lengths, BATCH_TOKENS):
            batch = collate([items[number] for number in numbers]).to(self.lm.device)
            samples = [
                [torch.from_numpy(ids) for ids in data.sampled_tokens((part.epoch, part.first + number))] for number in numbers
            ]
            merged = [torch.cat(ids).to(self.lm.device) for ids in zip(*samples, strict=True)]
            counts = [len(items[number]["index"]) for number in numbers]
            for name, values in self._features(batch, merged).items():
                check_numbers((self._target if FEATURES[name].reads_target else self.lm).name, values)
                for number, value in zip(numbers, values.cpu().split(counts), strict=True):
                    rows[number][name] = value
        return packed(rows)

    def _features(self, batch: HeadBatch, samples: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the features of a batch to store, with `samples` of its drafted tokens (n,)."""
        features, *others = sample_features(self.lm, batch, self.predicts, self.needs - set(ROUND_INPUTS), samples)
        for name in features:
            if FEATURES[name].of_token:
                features[name] = torch.stack([features[name], *(other[name] for other in others)], dim=1)
        if "target_hidden" in self.needs:
            # For a round that begins at the token; the state for any other round is the one stored with an earlier token.
            features["target_hidden"] = target_states(self._target, batch, batch.index)
        return features


class StoredResponses(Dataset):
    """Mixed responses with their features from a store."""

    def __init__(self, data: MixedResponses, store: FeatureStore, split: str) -> None:
        self.data, self.varies = data, data.varies
        self.parts = sorted((part for part in store.parts() if part.split == split), key=lambda part: (part.epoch, part.first))
        self.firsts = np.array([part.first for part in self.parts if part.epoch == 0])
        self.reader = ShardReader(store.folder)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, number = key
        place = int(np.searchsorted(self.firsts, number, side="right")) - 1
        part = self.parts[(epoch if self.varies else 0) * len(self.firsts) + place]
        features = self.reader.row(part.name, number - part.first)
        item = self.data[key]
        if "target_hidden" in features:
            features["target_hidden"] = features["target_hidden"][item["start"] - item["index"][0]]
        for name, values in features.items():
            if FEATURES[name].of_token:
                features[name] = values[:, epoch % values.shape[1]]
        return item | {"features": features}
