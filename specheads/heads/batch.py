"""The draft's features at every position that a head judges, and the batches that bring them.

The features are computed by the decoder's own code, so a head meets the same numbers in training and in decoding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from specheads.features import FEATURES, drafting_features, reads_logits
from specheads.pair import LanguageModel

SLICE_ELEMENTS = 2**24  # logits held at once
BATCH_TOKENS = 8192  # padded, that a model reads at once


@dataclass(frozen=True)
class HeadBatch:
    """Texts of one step; N judged positions among them.

    `tokens` (B, T) long, prompts and mixed responses, and rollouts behind their beginnings, zeros behind their ends. For the n-th judged
    token: `row` and `index` (N,) say where the text has it (or the target's token in its place), `drafted` (N,) is its id, `labels` (N,)
    by name what is to be learnt of it, NaN where there is nothing; `sampled` is its acceptance probability after the response. `start` (N,)
    is the place of its round's first token. `alive` (N,) is the chance that all tokens of its rollout before it are accepted, 1 outside of
    rollouts; None where nothing is learned. `features` (N, ...) are those that were stored.
    """

    tokens: Tensor
    row: Tensor
    index: Tensor
    drafted: Tensor
    labels: dict[str, Tensor]
    start: Tensor
    alive: Tensor | None = None
    features: dict[str, Tensor] = field(default_factory=dict)

    @property
    def label(self) -> Tensor:
        """The acceptance probabilities of the judged tokens (N,), NaN within rollouts."""
        return self.labels["sampled"]

    @property
    def of_response(self) -> Tensor:
        """Which judged tokens were drafted after the response itself (N,) bool; metrics are over these."""
        return ~self.label.isnan()

    def to(self, device: torch.device) -> "HeadBatch":
        named = {name: {key: value.to(device) for key, value in getattr(self, name).items()} for name in ("labels", "features")}
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "row", "index", "drafted", "start")}
        return replace(self, **moved, **named, alive=None if self.alive is None else self.alive.to(device))


def collate(items: Sequence[Mapping]) -> HeadBatch:
    """Return the items of one step as a HeadBatch, right-padded."""
    texts = [text for item in items for text in texts_of(item)]
    tokens = torch.zeros((len(texts), max(map(len, texts))), dtype=torch.long)
    for i, text in enumerate(texts):
        tokens[i, : len(text)] = torch.from_numpy(text)
    judged = {
        name: torch.from_numpy(np.concatenate([item[name] for item in items])) for name in ("index", "drafted", "start", "alive")
    }
    firsts = np.cumsum([0, *(len(texts_of(item)) for item in items[:-1])])
    row = torch.from_numpy(np.concatenate([first + item["text"] for first, item in zip(firsts, items, strict=True)]))
    labels = {name: torch.from_numpy(np.concatenate([item["labels"][name] for item in items])) for name in items[0]["labels"]}
    stored = items[0].get("features", {})
    features = {name: torch.cat([item["features"][name] for item in items]) for name in stored}
    return HeadBatch(tokens, row, labels=labels, features=features, **judged)


def texts_of(item: Mapping) -> list[np.ndarray]:
    """Return the tokens of every text of an item."""
    return [item["tokens"], *item["rollouts"]]


@torch.no_grad()
def head_features(lm: LanguageModel, batch: HeadBatch, predicts: str, needs: frozenset[str]) -> dict[str, Tensor]:
    """Return the draft's features in `needs` of every judged token (N, ...), as the decoder computes them.

    `input_token`: at the position that consumed the token; `next_token`: at the one before, which it was sampled from.
    """
    (features,) = drawn_features(lm, batch, predicts, needs, [batch.drafted])
    return features


@torch.no_grad()
def target_states(lm: LanguageModel, batch: HeadBatch, start: Tensor) -> Tensor:
    """Return the target's hidden states (N, H) that a round has which begins at `start` (N,) in the row of the n-th judged token.

    They are what the token before the round was decided from, so that of the position before that; zeros where there is none.
    """
    return _states(lm, batch.tokens, batch.row, (start - 2).clamp_min(0)) * (start >= 2)[:, None]


def _states(lm: LanguageModel, tokens: Tensor, row: Tensor, at: Tensor) -> Tensor:
    """Return the hidden states (N, H) at the places `at` (N,) of the rows `row` (N,) of `tokens` (B, T)."""
    texts = tokens.to(lm.device).split(max(1, BATCH_TOKENS // tokens.shape[1]))
    hidden = torch.cat([lm.hidden_states(some, use_cache=False) for some in texts])
    return hidden.to(tokens.device)[row, at]


@torch.no_grad()
def drawn_features(
    lm: LanguageModel, batch: HeadBatch, predicts: str, needs: frozenset[str], draws: Sequence[Tensor]
) -> list[dict[str, Tensor]]:
    """Return the features in `needs` for each of `draws`, tokens (N,) that may all have been drawn at the judged positions.

    What does not depend on the token is computed for the first draw only, and is not in the others.
    """
    at = batch.index if predicts == "input_token" else batch.index - 1
    hidden = _states(lm, batch.tokens, batch.row, at)
    with_logits = reads_logits(needs)
    parts: list[list[dict[str, Tensor]]] = [[] for _ in draws]
    for piece in torch.arange(len(at), device=hidden.device).split(max(1, SLICE_ELEMENTS // lm.vocab_size)):
        logits = lm.logits(hidden[piece]) if with_logits else hidden[piece]
        for number, (drafted, found) in enumerate(zip(draws, parts, strict=True)):
            wanted = {name for name in needs if FEATURES[name].of_token} if number else needs
            found.append(drafting_features(wanted, logits, drafted[piece], hidden[piece], lm.embed))
    return [{name: torch.cat([part[name] for part in found]) for name in found[0]} for found in parts]
