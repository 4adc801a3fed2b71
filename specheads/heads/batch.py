"""Batches of drafted tokens for heads, and the draft's features of these tokens, computed by the
same code as in the decoder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.heads.features import FEATURES, drafting_features, reads_logits
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import SLICE_ELEMENTS, right_padded, slices
from specheads.pair.reading import GivenTexts, states_of
from specheads.pair.sampling import active


@dataclass(frozen=True)
class HeadBatch:
    """The texts of one training step, prompts with mixed responses, and the N drafted tokens in
    them that heads predict.
    """

    tokens: Tensor  # (B, T) long, the texts, right-padded with zeros
    row: Tensor  # (N,) long, the text of each drafted token
    # (N,) long, the position in the text of the token, or of the target's token in its place
    index: Tensor
    drafted: Tensor  # (N,) long, the token's id
    label: Tensor  # (N,), the token's acceptance probability
    # (N, ...) by name, those that were stored
    features: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> "HeadBatch":
        return HeadBatch(**tree_map(lambda value: value.to(device), vars(self)))

    def read_by(self, predicts: str) -> GivenTexts:
        """Return the texts with the positions that heads read: the drafted tokens', or for
        `next_token` heads those that the tokens were sampled from, one before them.
        """
        position = self.index if predicts == "input_token" else self.index - 1
        return GivenTexts(self.tokens, self.row, position)


def collate(items: Sequence[Mapping]) -> HeadBatch:
    """Return the items of one step as a HeadBatch, right-padded."""
    names = ("index", "drafted", "label")
    joined = {
        name: torch.from_numpy(np.concatenate([item[name] for item in items])) for name in names
    }
    row = torch.from_numpy(np.repeat(np.arange(len(items)), [len(item["index"]) for item in items]))
    features = {
        name: torch.cat([item["features"][name] for item in items])
        for name in items[0].get("features", {})
    }
    return HeadBatch(
        right_padded([item["tokens"] for item in items]), row, features=features, **joined
    )


def head_features(
    lm: LanguageModel, batch: HeadBatch, predicts: str, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Return the draft's features in `needs` of every drafted token, (N, ...) by name, as the
    decoder computes them.
    """
    hidden = states_of(lm, batch.read_by(predicts)).to(batch.tokens.device)
    (features,) = sample_features(lm, hidden, needs, [batch.drafted])
    return features


@torch.no_grad()
def sample_features(
    lm: LanguageModel, hidden: Tensor, needs: frozenset[str], samples: Sequence[Tensor]
) -> list[dict[str, Tensor]]:
    """Return the features in `needs` for each of `samples`, token ids (N,) that the draft may
    sample where its states are `hidden` (N, H).

    Features that do not depend on the token are computed for the first sample only, and are left
    out for the others.
    """
    of_token = {name for name in needs if FEATURES[name].of_token}
    parts: list[list[dict[str, Tensor]]] = [[] for _ in samples]
    for piece in slices(len(hidden), lm.vocab_size, SLICE_ELEMENTS):
        logits = lm.logits(hidden[piece]) if reads_logits(needs) else hidden[piece]
        for number, (drafted, features) in enumerate(zip(samples, parts, strict=True)):
            wanted = of_token if number else needs
            features.append(
                drafting_features(
                    wanted,
                    logits,
                    drafted[piece],
                    hidden[piece],
                    lm.embed,
                    lm.kept_tokens,
                    active().softmax_sums,
                )
            )
    return [
        {name: torch.cat([part[name] for part in pieces]) for name in pieces[0]} for pieces in parts
    ]
