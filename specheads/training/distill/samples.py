"""What a draft is distilled on: for each train prompt a response of the data set, of the target, or of the draft itself.

In `mixed` samples it is drawn anew for every (epoch, prompt) whose response a prompt gets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from specheads.errors import UserError, is_count, is_number

KINDS = ("text", "target", "on_policy")  # whose response: the data set's, the target's, the draft's


@dataclass(frozen=True)
class SampleSettings:
    """Where responses come from.

    Args:
        samples: one of KINDS, or "mixed".
        mixed: share of each kind in mixed samples.
        refresh_every: optimiser steps for which the draft answers ahead, with the weights that it then has.
    """

    samples: str = "target"
    mixed: Mapping[str, float] = field(default_factory=dict)
    refresh_every: int = 16

    def __post_init__(self) -> None:
        if self.samples not in (*KINDS, "mixed"):
            raise UserError(f"samples={self.samples} is not known; use one of {', '.join(KINDS)}, mixed.")
        if unknown := sorted(set(self.mixed) - set(KINDS)):
            raise UserError(f"mixed.{unknown[0]} is not known; mixed has the shares of {', '.join(KINDS)}.")
        wrong = [kind for kind, share in self.mixed.items() if not is_number(share) or not 0 <= share < float("inf")]
        if wrong:
            raise UserError(f"mixed.{wrong[0]}={self.mixed[wrong[0]]} is no number of at least 0; it is a share of the samples.")
        if self.samples == "mixed" and not sum(self.mixed.values()) > 0:
            raise UserError("samples=mixed: all shares are 0; give for example mixed.target=0.5 mixed.on_policy=0.5.")
        if not is_count(self.refresh_every, least=1):
            raise UserError(f"refresh_every={self.refresh_every} is not a count of at least 1; it counts optimiser steps.")

    @property
    def shares(self) -> dict[str, float]:
        """The chance of each kind, of those that occur."""
        shares = self.mixed if self.samples == "mixed" else {self.samples: 1.0}
        total = sum(shares.values())
        return {kind: shares[kind] / total for kind in KINDS if shares.get(kind, 0) > 0}


class Ragged:
    """Rows of token ids of any length, one behind the other in an int32 array."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
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
        return np.diff(self.ends, prepend=0)


@dataclass(frozen=True)
class Responses:
    """All responses of one kind that are known beforehand; `of_prompt[i]` are the numbers of those to train prompt i."""

    tokens: Ragged
    of_prompt: Sequence[Sequence[int]]


@dataclass
class Sample:
    """A text to learn from: `prompt` (P,) and `response` (R,) ids; the response is None until the draft has written it.

    `number` is the response's among those of its kind, `law` what is stored of the target's law along it (see laws.py).
    """

    key: tuple[int, int]  # epoch and prompt
    kind: str
    prompt: np.ndarray
    response: np.ndarray | None
    number: int = -1
    distribution: Mapping[str, Any] | None = None


class Answered(Dataset):
    """Prompts with one known response each, as they are in every epoch."""

    def __init__(self, prompts: Ragged, responses: Ragged) -> None:
        self.prompts, self.responses = prompts, responses

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        return Sample(key, "target", self.prompts[key[1]], self.responses[key[1]], key[1])


class Samples(Dataset):
    """One sample per train prompt and epoch."""

    def __init__(
        self,
        prompts: Ragged,
        responses: Mapping[str, Responses],
        settings: SampleSettings,
        seed: int,
        distributions: Mapping[str, Any] | None = None,
    ) -> None:
        """`responses` by kind, those of "on_policy" left out; `laws` by kind what gives the stored law of a response by its number."""
        self.prompts, self.responses, self.settings, self.seed, self.distributions = (
            prompts,
            responses,
            settings,
            seed,
            dict(distributions or {}),
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def kind(self, key: tuple[int, int]) -> str:
        """Return whose response a prompt gets in an epoch."""
        shares = self.settings.shares
        if len(shares) == 1:
            return next(iter(shares))
        drawn = np.random.default_rng([self.seed, *key, 2]).random()
        place = np.searchsorted(np.cumsum(list(shares.values())), drawn, side="right")
        return list(shares)[min(int(place), len(shares) - 1)]

    def unanswered(self, keys: Sequence[tuple[int, int]]) -> list[Sample]:
        """Return the samples among `keys` that the draft is to write."""
        return [Sample(key, "on_policy", self.prompts[key[1]], None) for key in keys if self.kind(key) == "on_policy"]

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, row = key
        kind = self.kind(key)
        if kind == "on_policy":
            return Sample(key, kind, self.prompts[row], None)
        known = self.responses[kind]
        numbers = known.of_prompt[row]
        number = int(numbers[epoch % len(numbers)])
        distribution = self.distributions[kind][number] if kind in self.distributions else None
        return Sample(key, kind, self.prompts[row], known.tokens[number], number, distribution)
