"""The samples that a draft learns from: each train prompt with a response of the data set, of the target, or of the draft.

In mixed samples the kind of response is chosen at random for every (epoch, prompt).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from specheads.replay.response_batch import ResponseBatch


class Ragged:
    """Rows of token ids, of any length, one after the other in an int32 array."""

    def __init__(self, rows: Sequence[Sequence[int] | np.ndarray]) -> None:
        self.ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        self.values = np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]) if len(rows) else np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.values[self.ends[number - 1] if number else 0 : self.ends[number]]

    @classmethod
    def of_column(cls, column: Any) -> "Ragged":
        """Return the rows of an Arrow column of lists."""
        return cls(column.to_numpy(zero_copy_only=False)) if len(column) else cls([])

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each row."""
        return np.diff(self.ends, prepend=0)


@dataclass(frozen=True)
class Responses:
    """All responses of one kind that exist before training; `of_prompt[i]` are the numbers of those to train prompt i."""

    tokens: Ragged
    of_prompt: Sequence[Sequence[int]]


@dataclass
class Sample:
    """A text to learn from: `prompt` (P,) and `response` (R,) ids; the response is None until the draft has written it.

    `number` is the response's among those of its kind. `stored` are the target's distributions along it, `ids` (R, k) and
    `log_probs` (R, k + 1), if they are stored (TargetStore).
    """

    key: tuple[int, int]  # epoch and prompt
    kind: str
    prompt: np.ndarray
    response: np.ndarray | None
    number: int = -1
    stored: Mapping[str, Tensor] | None = None


def batch_of(samples: Sequence[Sample], device: torch.device) -> ResponseBatch:
    """Return the batch of samples, all of which have responses."""
    responses = [sample.response for sample in samples if sample.response is not None]
    return ResponseBatch.of([sample.prompt for sample in samples], responses, device)


class HeldOutSamples(Dataset):
    """Held-out prompts with the target's response to each, the same in every epoch."""

    def __init__(self, prompts: Ragged, responses: Ragged) -> None:
        self.prompts, self.responses = prompts, responses

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        return Sample(key, "target", self.prompts[key[1]], self.responses[key[1]], key[1])


class TrainSamples(Dataset):
    """One sample per train prompt and epoch."""

    def __init__(
        self,
        prompts: Ragged,
        responses: Mapping[str, Responses],
        shares: Mapping[str, float],
        seed: int,
        stored: Mapping[str, Any] | None = None,
    ) -> None:
        """Sample responses by their kind.

        Args:
            responses: by kind, except "on_policy", which the draft writes during training.
            shares: the probability of each kind that occurs.
            seed: of the choice between kinds.
            stored: by kind, the target's distributions along a response by its number (TargetStore).
        """
        self.prompts, self.responses, self.shares, self.seed = prompts, responses, dict(shares), seed
        self.stored = dict(stored or {})

    def __len__(self) -> int:
        return len(self.prompts)

    def kind(self, key: tuple[int, int]) -> str:
        """Return the kind of response that a prompt gets in an epoch."""
        if len(self.shares) == 1:
            return next(iter(self.shares))
        uniform = np.random.default_rng([self.seed, *key, 2]).random()
        place = np.searchsorted(np.cumsum(list(self.shares.values())), uniform, side="right")
        return list(self.shares)[min(int(place), len(self.shares) - 1)]

    def unanswered(self, keys: Sequence[tuple[int, int]]) -> list[Sample]:
        """Return the samples among `keys` that need a response by the draft."""
        return [Sample(key, "on_policy", self.prompts[key[1]], None) for key in keys if self.kind(key) == "on_policy"]

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, row = key
        kind = self.kind(key)
        if kind == "on_policy":
            return Sample(key, kind, self.prompts[row], None)
        responses = self.responses[kind]
        numbers = responses.of_prompt[row]
        number = int(numbers[epoch % len(numbers)])
        stored = self.stored[kind][number] if kind in self.stored else None
        return Sample(key, kind, self.prompts[row], responses.tokens[number], number, stored)
