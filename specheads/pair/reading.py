"""The states of models along given texts, which are read and not generated.

Labels, features, distillation, replay and the probe ask here for the states that predict the tokens
of responses. Drafts that branch off from a text need its KV cache, which `decoding/branches.py`
keeps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specheads.pair.draft import DraftModel
from specheads.pair.padding import BATCH_TOKENS, batches_of_tokens, right_padded, slices
from specheads.pair.pair import Pair


class GivenTexts(NamedTuple):
    """B texts, and N positions in them whose states are asked for."""

    tokens: Tensor  # (B, T) long, zeros after the texts' ends, which no state before them sees
    row: Tensor  # (N,) long, ascending, the text of each position
    position: Tensor  # (N,) long

    @classmethod
    def with_responses(
        cls,
        prompts: Sequence[Sequence[int] | np.ndarray],
        responses: Sequence[Sequence[int] | np.ndarray],
    ) -> "GivenTexts":
        """Return prompts with their responses, and the positions that predict the responses'
        tokens: each is one before its token. No prompt is empty.
        """
        texts = [np.concatenate(text) for text in zip(prompts, responses, strict=True)]
        lengths = torch.tensor([len(response) for response in responses])
        first = torch.tensor([len(prompt) - 1 for prompt in prompts])
        row = torch.arange(len(texts)).repeat_interleave(lengths)
        before = lengths.cumsum(0) - lengths
        within = torch.arange(len(row)) - before[row]
        return cls(right_padded(texts), row, first[row] + within)

    def at(self, hidden: Tensor) -> Tensor:
        """Return the states (N, H) at the positions, of those of all tokens (B, T, H)."""
        return hidden[self.row.to(hidden.device), self.position.to(hidden.device)]

    def of_rows(self, states: Tensor) -> list[Tensor]:
        """Return states (N, H) by text, (n, H) each."""
        return list(states.split(torch.bincount(self.row, minlength=len(self.tokens)).tolist()))


class States(NamedTuple):
    """The hidden states of both models at the positions of given texts, each on its own device."""

    target: Tensor  # (N, H)
    draft: Tensor  # (N, H)


@torch.no_grad()
def read(pair: Pair, texts: GivenTexts, of_target: Tensor | None = None) -> States:
    """Return the states of both models; each reads a text once, in the order of the rows.

    With the states `of_target` (N, H), as it wrote the texts, the target reads none, unless the
    draft reads its layers.
    """
    draft: DraftModel = pair.draft_lm
    if not draft.reads_layers:
        if of_target is None:
            of_target = states_of(pair.target_lm, texts)
        return States(of_target.to(pair.target_lm.device), states_of(draft, texts))
    target = pair.target_lm
    parts = []
    for rows in slices(len(texts.tokens), texts.tokens.shape[1], BATCH_TOKENS):
        tokens = texts.tokens[rows]
        with target.noting_inputs(draft.reads_layers) as inputs:
            of_target = target.states_along(tokens.to(target.device))
        layers = torch.cat([inputs[layer] for layer in draft.reads_layers], dim=-1)
        tokens = tokens.to(draft.device)
        parts.append((of_target, draft.states_along(tokens, layers.to(draft.device))))
    targets, drafts = zip(*parts, strict=True)
    return States(texts.at(torch.cat(targets)), texts.at(torch.cat(drafts)))


def states_of(lm: DraftModel, texts: GivenTexts, max_tokens: int = BATCH_TOKENS) -> Tensor:
    """Return the states (N, H) of one model, which reads no other, on its device.

    It reads at most `max_tokens` at once, or one text.
    """
    return texts.at(whole_states(lm, texts.tokens, max_tokens))


def whole_states(lm: DraftModel, tokens: Tensor, max_tokens: int = BATCH_TOKENS) -> Tensor:
    """Return the states (B, T, H) after each of `tokens` (B, T) of right-padded texts."""
    passes = slices(len(tokens), tokens.shape[1], max_tokens)
    return torch.cat([lm.states_along(tokens[rows].to(lm.device)) for rows in passes])


def states_by_length(lm: DraftModel, texts: GivenTexts) -> Tensor:
    """Return what `states_of` does; texts of similar length are read together, so that few
    positions are padding.
    """
    counts = torch.bincount(texts.row, minlength=len(texts.tokens)).tolist()
    positions = texts.position.split(counts)
    ends = [int(each.max()) + 1 if len(each) else 1 for each in positions]
    tokens = texts.tokens.to(lm.device)
    states: dict[int, Tensor] = {}
    for rows in batches_of_tokens(ends, BATCH_TOKENS):
        longest = max(ends[row] for row in rows)
        hidden = lm.states_along(tokens[rows, :longest])
        for place, row in enumerate(rows):
            states[row] = hidden[place, positions[row].to(hidden.device)]
    return torch.cat([states[row] for row in range(len(ends))])
