"""Batches of drafted tokens for heads, and the draft's features of these tokens, computed by the
same code as in the decoder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specheads.heads.features import FEATURES, drafting_features, reads_logits
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import SLICE_ELEMENTS, right_padded, slices
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts, draft_states
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
    # Of a draft that reads its target: the texts (B, T) long without drafted tokens, which the
    # target has read, and at which depth (N,) long each drafted token was sampled
    committed: Tensor | None = None
    depth: Tensor | None = None

    def to(self, device: torch.device) -> "HeadBatch":
        return HeadBatch(**tree_map_only(Tensor, lambda value: value.to(device), vars(self)))

    def read_by(self, predicts: str) -> GivenTexts:
        """Return the texts with the positions that heads read: the drafted tokens', or for
        `next_token` heads those that the tokens were sampled from, one before them.
        """
        was_read = int(predicts == "input_token")
        position = self.index - 1 + was_read
        if self.depth is None or self.committed is None:
            return GivenTexts(self.tokens, self.row, position)
        depth = self.depth + was_read  # the draft has made one step more
        return GivenTexts(self.committed, self.row, position, depth, self.tokens)


def collate(items: Sequence[Mapping]) -> HeadBatch:
    """Return the items of one step as a HeadBatch, right-padded."""
    names = ["index", "drafted", "label"]
    tokens = right_padded([item["tokens"] for item in items])
    committed = None
    if "committed" in items[0]:
        names.append("depth")
        committed = right_padded([item["committed"] for item in items])
    joined = {
        name: torch.from_numpy(np.concatenate([item[name] for item in items])) for name in names
    }
    row = torch.from_numpy(np.repeat(np.arange(len(items)), [len(item["index"]) for item in items]))
    features = {
        name: torch.cat([item["features"][name] for item in items])
        for name in items[0].get("features", {})
    }
    return HeadBatch(tokens, row, features=features, committed=committed, **joined)


def head_features(
    pair: Pair, batch: HeadBatch, predicts: str, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Return the draft's features in `needs` of every drafted token, (N, ...) by name, as the
    decoder computes them.
    """
    texts = batch.read_by(predicts)
    lm = pair.draft_lm
    if all(not FEATURES[name].stored for name in needs):  # none is of a state
        hidden = texts.position[:, None]
    else:
        hidden = draft_states(pair, texts).to(batch.tokens.device)
    (features,) = sample_features(lm, hidden, needs, [batch.drafted], texts.depth)
    return features


@torch.no_grad()
def sample_features(
    lm: LanguageModel,
    hidden: Tensor,
    needs: frozenset[str],
    samples: Sequence[Tensor],
    depth: Tensor | None = None,
) -> list[dict[str, Tensor]]:
    """Return the features in `needs` for each of `samples`, token ids (N,) that the draft may
    sample where its states are `hidden` (N, H), at `depth` (N,).

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
                    None if depth is None else depth[piece],
                )
            )
    return [
        {name: torch.cat([part[name] for part in pieces]) for name in pieces[0]} for pieces in parts
    ]
