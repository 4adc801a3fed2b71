"""What heads are trained on: mixed token sequences, and the draft's features at every position that is judged.

Mixing (SpecDec++, section 3.2) replaces a part of the response by drafted tokens, so that hidden states come from text like
the decoder's. It is redrawn every epoch from a seed per (example, epoch). The features are computed by the decoder's own
code, so a head meets the same numbers in both places.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from specheads.decoding.drafting import drafting_features
from specheads.errors import UserError
from specheads.pair import LanguageModel

SLICE_ELEMENTS = 2**24  # logits held at once

LABELS = {"sampled": "accept_prob", "overlap": "overlap"}  # head.label -> column of the data

# The paper mixes because its heads must have read the drafted token. A look-ahead head need not, and a round's survival is a
# product of chances that each assume all tokens before to be accepted: the target's own text is the context to learn from.
# Measured on nano: benchmarks/README.md, kinds of heads.
RESPONSE_SHARE = {"input_token": 0.15, "next_token": 1.0}


@dataclass(frozen=True)
class HeadBatch:
    """Rows of one step; N judged positions among them.

    `tokens` (B, T) long, prompts and mixed responses, zeros behind their ends. For the n-th judged token: `row` and `index`
    (N,) say where the mixed sequence has it (or the target's token in its place), `drafted` (N,) is its id, `label` (N,) its
    acceptance probability.
    """

    tokens: Tensor
    row: Tensor
    index: Tensor
    drafted: Tensor
    label: Tensor

    def to(self, device: torch.device) -> "HeadBatch":
        return HeadBatch(*(value.to(device) for value in vars(self).values()))


def checked_share(judges: str, response_share: float | None, label: str) -> float:
    """Return the share of positions that keep the target's token, None being the kind's default.

    Raises:
        UserError: a share outside [0, 1], or one that leaves an `input_token` head nothing to judge; an unknown label.
    """
    share = RESPONSE_SHARE[judges] if response_share is None else response_share
    if not 0 <= share <= (0.99 if judges == "input_token" else 1):
        raise UserError(
            f"mixing.response_share={share} leaves a {judges} head nothing to learn; use a share from 0 to 0.99, for example 0.15."
        )
    if label not in LABELS:
        raise UserError(f"head.label={label!r} is not known; use one of {', '.join(LABELS)}.")
    return share


class MixedResponses(Dataset):
    """Rows of a data cache, mixed anew for every (epoch, row) that is asked for."""

    def __init__(self, rows: Any, judges: str, response_share: float | None, seed: int, label: str = "sampled") -> None:
        """Mix `rows` (a `datasets.Dataset`).

        `response_share` is the chance that a position keeps the target's token, None the default of the kind; `label` is
        `sampled` (the drafted token's acceptance probability) or `overlap` (its mean over tokens).

        Raises:
            UserError: see `checked_share`.
        """
        share = checked_share(judges, response_share, label)
        self.rows, self.judges, self.response_share, self.seed = rows, judges, share, seed
        self.column = LABELS[label]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, np.ndarray]:
        epoch, index = key
        row = self.rows[index]
        response, drafted = np.array(row["response_ids"]), np.array(row["draft_ids"])
        kept = np.random.default_rng([self.seed, epoch, index]).random(len(response)) < self.response_share
        # A head that judges its input token needs that token to have been read; one that looks ahead needs only its prefix.
        judged = ~kept if self.judges == "input_token" else np.ones_like(kept)
        return {
            "tokens": np.concatenate([row["prompt_ids"], np.where(kept, response, drafted)]),
            "index": len(row["prompt_ids"]) + np.flatnonzero(judged),
            "drafted": drafted[judged],
            "label": np.array(row[self.column], dtype=np.float32)[judged],
        }


def collate(items: Sequence[Mapping[str, np.ndarray]]) -> HeadBatch:
    """Return the items of one step as a HeadBatch, right-padded."""
    tokens = torch.zeros((len(items), max(len(item["tokens"]) for item in items)), dtype=torch.long)
    for i, item in enumerate(items):
        tokens[i, : len(item["tokens"])] = torch.from_numpy(item["tokens"])
    columns = {name: torch.from_numpy(np.concatenate([item[name] for item in items])) for name in ("index", "drafted", "label")}
    row = torch.repeat_interleave(torch.arange(len(items)), torch.tensor([len(item["index"]) for item in items]))
    return HeadBatch(tokens=tokens, row=row, **columns)


class EpochSampler(Sampler):
    """Yields (epoch, row) so that the data knows the epoch.

    Every process of a distributed run takes its own share, all of the same size, or one would wait for the others forever.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool, rank: int = 0, world_size: int = 1) -> None:
        self.num_rows, self.seed, self.shuffle, self.rank, self.world_size = num_rows, seed, shuffle, rank, world_size
        self.epoch = 0
        self.start = 0  # rows of this process to leave out, because an interrupted run has had them

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows // self.world_size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.epoch if self.shuffle else 0
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_rows) if self.shuffle else np.arange(self.num_rows)
        return iter([(epoch, int(i)) for i in order[self.rank :: self.world_size][self.start : len(self)]])


class ResumableLoader(DataLoader):
    """A loader over an EpochSampler that goes on within an epoch: Lightning keeps its state in checkpoints."""

    position = 0  # batches of this epoch that were handed out
    skip = 0

    def __iter__(self) -> Iterator[HeadBatch]:
        self.position, self.skip = self.skip, 0
        self.sampler.start = self.position * self.batch_size
        for batch in super().__iter__():
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the next batch to hand out."""
        return {"epoch": self.sampler.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.sampler.set_epoch(state["epoch"])
        self.skip = state["position"]


@torch.no_grad()
def head_features(lm: LanguageModel, batch: HeadBatch, judges: str, needs: frozenset[str]) -> dict[str, Tensor]:
    """Return the features in `needs` of every judged token (N, ...), as the decoder computes them.

    `input_token`: at the position that consumed the token; `next_token`: at the one before, which it was sampled from.
    """
    hidden = lm.hidden_states(batch.tokens, use_cache=False)
    at = batch.index if judges == "input_token" else batch.index - 1
    hidden = hidden[batch.row, at]
    with_logits = needs - {"hidden", "embedding", "token"}
    parts = []
    for piece in torch.arange(len(at), device=hidden.device).split(max(1, SLICE_ELEMENTS // lm.vocab_size)):
        logits = lm.logits(hidden[piece]) if with_logits else hidden[piece]
        parts.append(drafting_features(lm, needs, logits, batch.drafted[piece], hidden[piece]))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
