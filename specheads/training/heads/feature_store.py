"""The draft's features of a whole data cache on disk, so that the draft reads each text once and not once per epoch.

`features/<fingerprint>/` in the cache's folder: shards of safetensors with checksums, mapped into memory when they are read. A
shard appears by rename; a restart makes what is missing.
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

from specheads.errors import UserError, is_number
from specheads.features import FEATURES, RECORDED
from specheads.heads.batch import BATCH_TOKENS, collate, drawn_features, target_states, texts_of
from specheads.pair import LanguageModel
from specheads.storage.shards import fingerprint
from specheads.storage.tensor_shards import GIB, ShardReader, make_missing, packed, spans
from specheads.training.heads.mixed_responses import MixedResponses

logger = logging.getLogger(__name__)

CHOICES = ("auto", "cached", "online")


def check_choice(features: Any, budget_gib: Any) -> None:
    """Raise UserError for settings of the store that are none."""
    if features not in CHOICES:
        raise UserError(f"features={features} is not known; use one of {', '.join(CHOICES)}.")
    if not is_number(budget_gib) or budget_gib < 0:
        raise UserError(f"features_budget={budget_gib} is no number of at least 0; it is the largest size of the store in GiB.")


@dataclass(frozen=True)
class Part:
    """Rows `first` to `first + count` of a split, as their texts are in one epoch (0 where they stay the same)."""

    split: str
    epoch: int
    first: int
    count: int

    @property
    def name(self) -> str:
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
        num_rows: Mapping[str, int] | None = None,
    ) -> None:
        """Plan the store of the cache in `folder`.

        Args:
            lm: the draft.
            splits: what heads are trained on; one kind of head.
            needs: features that they read; `embedding` is left out, because looking it up takes no longer than reading it, and
                `index`, which is drawn.
            num_epochs: of training; texts that are mixed anew for each are stored for each.
            target: where heads read its states.
            num_rows: by split how many of its first rows are read; default all.
        """
        self.lm, self.splits, self.target = lm, splits, target
        any_split = next(iter(splits.values()))
        self.predicts = any_split.predicts
        self.needs = (needs | set(CERTAINTY) if self.predicts == "next_token" else needs) - {"embedding", "index"}
        self.epochs = {name: range(num_epochs if data.varies and name == "train" else 1) for name, data in splits.items()}
        self.facts = {
            "data": folder.name,
            "features": sorted(self.needs),
            "predicts": self.predicts,
            "texts": {name: [data.response_share, data.seed, len(data), data.rolls] for name, data in splits.items()},
        }
        self.cache, self.folder = folder, folder / "features" / fingerprint(self.facts)
        self.lengths = {name: data.lengths() for name, data in splits.items()}
        self.num_rows = {name: len(data) for name, data in splits.items()} | dict(num_rows or {})

    @property
    def bytes_per_token(self) -> int:
        """What a judged token takes."""
        hidden = self.lm.hidden_size * self.lm.output_embedding.weight.element_size() if "hidden" in self.needs else 0
        if "target_hidden" in self.needs:
            hidden += self.target.hidden_size * self.target.output_embedding.weight.element_size()
        draws = max(data.num_samples for data in self.splits.values())
        return hidden + 4 * (len(self.needs & {"max_prob", "entropy"}) + draws * ("draft_prob" in self.needs))

    def bytes(self) -> int:
        """Return the size of the whole store, at most."""
        return sum(map(self.bytes_of, self.parts()))

    def bytes_of(self, part: Part) -> int:
        """Return the size of a shard, at most."""
        return self.bytes_per_token * int(self.lengths[part.split][part.first : part.first + part.count].sum())

    def parts(self) -> Iterator[Part]:
        """Yield the shards."""
        for split, epochs in self.epochs.items():
            for epoch in epochs:
                for first, count in spans(self.lengths[split] * self.bytes_per_token):
                    if first < self.num_rows[split]:
                        yield Part(split, epoch, first, count)

    def splits_by(self, features: str, budget_gib: float) -> dict[str, Dataset]:
        """Return the splits, with stored features if `features`, one of CHOICES, says so; what is missing of them is made first.

        `auto` stores them where the texts stay the same from epoch to epoch and the store is within `budget_gib` and fits the disk.

        Raises:
            UserError: `cached` where the store would be larger than the budget or the disk.
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
                f"features=cached would take {size:.1f} GiB, but features_budget={budget_gib:g}; raise it, use features=online, or "
                "fewer prompts (data.num_train) or, where texts are mixed anew for each epoch, epochs (trainer.max_epochs)."
            )
        if missing > free:
            raise UserError(
                f"features=cached would take {missing:.1f} GiB more, but {self.cache} has {free:.1f} GiB free; use features=online."
            )
        self.make()
        return {name: StoredResponses(data, self, name) for name, data in self.splits.items()}

    def make(self) -> None:
        """Compute what is missing."""
        parts = {part.name: part for part in self.parts()}
        num_rows = {name: part.count for name, part in parts.items()}
        make_missing(self.folder, self.facts, num_rows, lambda name: self._computed(parts[name]), "features", self.bytes() / GIB)

    def _computed(self, part: Part) -> dict[str, Tensor]:
        """Return the tensors of a shard: features (n, ...), `draft_prob` (n, draws)."""
        data = self.splits[part.split]
        items = [data[part.epoch, number] for number in range(part.first, part.first + part.count)]
        # Rows of similar length are read together; their features are put back in order.
        longest = [max(map(len, texts_of(item))) for item in items]
        order = sorted(range(len(items)), key=longest.__getitem__)
        rows: list[dict[str, Tensor]] = [{} for _ in items]
        for numbers in _batches(order, longest, [len(texts_of(item)) for item in items]):
            batch = collate([items[number] for number in numbers]).to(self.lm.device)
            draws = [
                [torch.from_numpy(ids) for ids in data.judged_draws((part.epoch, part.first + number))] for number in numbers
            ]
            merged = [torch.cat(ids).to(self.lm.device) for ids in zip(*draws, strict=True)]
            first, *more = drawn_features(self.lm, batch, self.predicts, self.needs - {"target_hidden"}, merged)
            if "target_hidden" in self.needs:
                # Of the round that begins at the token; the state of any other round is that of an earlier token.
                first["target_hidden"] = target_states(self.target, batch, batch.index)
            if "draft_prob" in first:
                first["draft_prob"] = torch.stack([first["draft_prob"], *(found["draft_prob"] for found in more)], dim=1)
            counts = [len(items[number]["index"]) for number in numbers]
            for name, values in first.items():
                for number, value in zip(numbers, values.cpu().split(counts), strict=True):
                    rows[number][name] = value
        return packed(rows)


def _batches(order: Sequence[int], lengths: Sequence[int], counts: Sequence[int]) -> Iterator[list[int]]:
    """Yield rows in `order`, of ascending lengths of their texts, `counts` of them each, whose padded size stays within BATCH_TOKENS."""
    batch: list[int] = []
    for number in order:
        if batch and (sum(counts[one] for one in batch) + counts[number]) * lengths[number] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    yield batch


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
        if "draft_prob" in features:
            draw = epoch % features["draft_prob"].shape[1]
            features["draft_prob"] = features["draft_prob"][:, draw]
        return item | {"features": features}
