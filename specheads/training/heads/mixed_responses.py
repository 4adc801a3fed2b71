"""The texts that heads learn from, and the tokens that they predict there.

Mixing (SpecDec++, section 3.3) replaces a part of the response by drafted tokens: states then come from text like the decoder's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from specheads.heads.features import FEATURES
from specheads.training.heads.settings import checked_share

COLUMNS = ("prompt_ids", "response_ids", "draft_ids", "accept_prob", "more_draft_ids", "more_accept_prob")
MOST_KEPT = 10_000  # rows that stay in memory, about 10 KiB each: reading one takes longer than a step takes for it


def _samples_of(row: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the drafted tokens and their acceptance probabilities, (N,) each, of every sample in a row."""
    ids, probs = ([row[name], *row[f"more_{name}"]] for name in ("draft_ids", "accept_prob"))
    return [(np.asarray(drafted), np.asarray(accepted)) for drafted, accepted in zip(ids, probs, strict=True)]


class MixedResponses(Dataset):
    """Rows of a data set, mixed differently in every epoch.

    Each epoch takes another one of the tokens that were sampled at a position: a head then learns how probabilities differ
    between tokens instead of memorising one.
    """

    def __init__(self, rows: Any, predicts: str, response_share: float | None, seed: int) -> None:
        """Mix `rows` (a `datasets.Dataset`, or dicts of its columns); for `response_share` see `checked_share`."""
        self.predicts, self.seed = predicts, seed
        self.response_share = checked_share(predicts, response_share)
        self.rows = rows.with_format("numpy", columns=list(COLUMNS)) if hasattr(rows, "with_format") else rows
        self._kept: dict[int, Mapping[str, Any]] = {}
        self.features: Callable[[int], dict[str, Tensor]] | None = None  # of a row, where they are stored: see FeatureStore

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self) -> np.ndarray:
        """Return the number of tokens in each row's response (rows,)."""
        if not hasattr(self.rows, "with_format"):
            return np.array([len(row["response_ids"]) for row in self.rows])
        responses = self.rows.with_format("arrow", columns=["response_ids"])[:].column(0).combine_chunks()
        return responses.value_lengths().to_numpy().astype(np.int64)

    def sampled_tokens(self, number: int) -> list[np.ndarray]:
        """Return the tokens (n,) of every sample at the positions of a row's response."""
        return [drafted.astype(np.int64) for drafted, _ in _samples_of(self.rows[number])]

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, number = key
        row = self._kept.get(number) or self.rows[number]
        if len(self._kept) < MOST_KEPT:
            self._kept[number] = row
        response, samples = np.asarray(row["response_ids"]), _samples_of(row)
        drafted, accept_prob = samples[epoch % len(samples)]
        kept = np.random.default_rng([self.seed, epoch, number]).random(len(response)) < self.response_share
        # The draft must have read the token for an input_token head; a next_token head needs only the prefix.
        predicted = ~kept if self.predicts == "input_token" else np.ones_like(kept)
        item = {
            "tokens": np.concatenate([row["prompt_ids"], np.where(kept, response, drafted)]).astype(np.int64),
            "index": len(row["prompt_ids"]) + np.flatnonzero(predicted),
            "drafted": drafted[predicted].astype(np.int64),
            "label": accept_prob[predicted].astype(np.float32),
        }
        if self.features is not None:
            stored = self.features(number).items()
            item["features"] = {
                name: each[:, epoch % each.shape[1]] if FEATURES[name].of_token else each for name, each in stored
            }
        return item
