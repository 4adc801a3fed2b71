"""The states of models along given texts, which are read and not generated.

Labels, features, distillation, replay and the probe ask here for the states that predict the tokens
of responses. Drafts that branch off from a text need its KV cache, which `decoding/branches.py`
keeps.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specheads.pair.feature_draft import FeatureDraft
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import BATCH_TOKENS, batches_of_tokens, right_padded, slices
from specheads.pair.pair import Pair
from specheads.pair.unrolled import unrolled


class GivenTexts(NamedTuple):
    """B texts, and N positions in them whose states are asked for."""

    tokens: Tensor  # (B, T) long, zeros after the texts' ends, which no state before them sees
    row: Tensor  # (N,) long, ascending, the text of each position
    position: Tensor  # (N,) long
    # Of a draft that reads its target: how many steps it has made from its own states, (N,) long,
    # and the tokens (B, T) long that these steps read; default: 0, and those of the texts
    depth: Tensor | None = None
    drafted: Tensor | None = None
    # What such a draft reads of each token, then the target's state, where they are known: (B, T,
    # (L + 1) H_target); default: the target reads the texts
    of_target: Tensor | None = None

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

    def by_length(self, max_tokens: int) -> "Iterator[tuple[Tensor, GivenTexts]]":
        """Yield texts of similar length, so that few tokens are padding, after the places (n,) of
        their positions among the N; at most `max_tokens`, or one text.
        """
        row = self.row.cpu()
        counts = torch.bincount(row, minlength=len(self.tokens))
        numbers = torch.arange(len(row)).split(counts.tolist())
        ends = torch.ones_like(counts).scatter_reduce(0, row, self.position.cpu() + 1, "amax")
        for rows in batches_of_tokens(ends.tolist(), max_tokens):
            places = torch.cat([numbers[each] for each in rows])
            texts = slice(0, int(ends[rows].max()))
            yield (
                places,
                GivenTexts(
                    self.tokens[rows, texts],
                    torch.arange(len(rows)).repeat_interleave(counts[rows]),
                    self.position[places],
                    None if self.depth is None else self.depth[places],
                    None if self.drafted is None else self.drafted[rows, texts],
                    None if self.of_target is None else self.of_target[rows, texts],
                ),
            )


class States(NamedTuple):
    """The hidden states of both models at the positions of given texts, each on its own device."""

    target: Tensor  # (N, H_target)
    draft: Tensor  # (N, H)


@torch.no_grad()
def read(
    pair: Pair,
    texts: GivenTexts,
    of_target: Tensor | None = None,
    max_tokens: int = BATCH_TOKENS,
) -> States:
    """Return the states of both models; each reads a text once, at most `max_tokens` at once.

    With the states `of_target` (N, H_target), as it wrote the texts, the target reads none, unless
    the draft reads its layers.
    """
    draft = pair.draft_lm
    if draft.reads_layers:
        return _read_together(pair, texts, max_tokens, _at_depths)
    if of_target is None:
        of_target = states_of(pair.target_lm, texts, max_tokens)
    return States(of_target.to(pair.target_lm.device), states_of(draft, texts, max_tokens))


def draft_states(pair: Pair, texts: GivenTexts) -> Tensor:
    """Return the states (N, H) of the draft, for which the target reads nothing but what the draft
    needs of it.
    """
    if pair.draft_lm.reads_layers:
        return read(pair, texts).draft
    return states_of(pair.draft_lm, texts)


def states_of(lm: LanguageModel, texts: GivenTexts, max_tokens: int = BATCH_TOKENS) -> Tensor:
    """Return the states (N, H) of a model that reads no other, on its device; it reads at most
    `max_tokens` at once, or one text.
    """
    states = list[Tensor]()
    order = list[Tensor]()
    for places, part in texts.by_length(max_tokens):
        states.append(part.at(lm.states_along(part.tokens.to(lm.device))))
        order.append(places)
    return torch.cat(states)[torch.cat(order).argsort()]


def whole_states(lm: LanguageModel, tokens: Tensor) -> Tensor:
    """Return the states (B, T, H) after each of `tokens` (B, T) of right-padded texts."""
    passes = slices(len(tokens), tokens.shape[1], BATCH_TOKENS)
    return torch.cat([lm.states_along(tokens[rows].to(lm.device)) for rows in passes])


def read_steps(pair: Pair, texts: GivenTexts) -> tuple[Tensor, Iterator[Tensor]]:
    """Return the target's states (N, H_target), and those (N, H) of a draft that reads it, after
    one step, two and so on. All texts are read at once.

    States of rounds that begin before the first position are 0: no steps are made in prompts.
    """
    draft: FeatureDraft = pair.draft
    if texts.of_target is None:
        hidden, features = read_features(pair.target_lm, texts.tokens, draft.config.target_layers)
    else:
        widths = draft.fc.in_features, pair.target_lm.hidden_size
        features, hidden = texts.of_target.to(pair.target_lm.device).split(widths, dim=-1)
    drafted = texts.tokens if texts.drafted is None else texts.drafted
    begins = texts.position if texts.depth is None else texts.position - texts.depth
    steps = unrolled(
        draft,
        texts.tokens.to(draft.device),
        features.to(draft.device),
        drafted.to(draft.device),
        begin=min(begins.tolist(), default=0),
    )
    return texts.at(hidden), map(texts.at, steps)


@torch.no_grad()
def read_features(
    target: LanguageModel, tokens: Tensor, layers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the target's states (B, T, H_target) after each of `tokens` (B, T), and the inputs of
    some of its layers next to each other, (B, T, L H_target).
    """
    with target.noting_inputs(layers) as inputs:
        hidden = target.states_along(tokens.to(target.device))
    parts = [inputs[layer].to(target.device) for layer in layers]
    return hidden, torch.cat(parts, dim=-1)


def _read_together(
    pair: Pair,
    texts: GivenTexts,
    max_tokens: int,
    chosen: Callable[[GivenTexts, Iterator[Tensor]], Tensor],
) -> States:
    """Return the states of a target, and of a draft that reads it those that `chosen` returns for
    texts of similar length, of the states (n, H) after each of its steps.
    """
    of_target = list[Tensor]()
    of_draft = list[Tensor]()
    order = list[Tensor]()
    for places, part in texts.by_length(max_tokens):
        hidden, steps = read_steps(pair, part)
        of_target.append(hidden)
        of_draft.append(chosen(part, steps))
        order.append(places)
    back = torch.cat(order).argsort()
    return States(torch.cat(of_target)[back], torch.cat(of_draft)[back])


def _at_depths(texts: GivenTexts, steps: Iterator[Tensor]) -> Tensor:
    """Return each position's state (n, H) at its depth."""
    states = next(steps)
    if texts.depth is None:
        return states
    depth = texts.depth.to(states.device)
    for step in range(1, max(depth.tolist(), default=0) + 1):
        states = torch.where(depth[:, None] == step, next(steps), states)
    return states


class StatesByDepth(NamedTuple):
    """The states of both models that predict the tokens of given texts, the draft's at each of J
    depths.
    """

    target: Tensor  # (N, H_target)
    draft: Tensor  # (N, J, H), after 1 to J steps
    exists: Tensor  # (N, J) bool: whether a round that drafts so much begins within the response


def read_by_depth(
    pair: Pair, texts: GivenTexts, num_steps: int, max_tokens: int = BATCH_TOKENS
) -> StatesByDepth:
    """Return the states of a target and of a draft that reads it at `num_steps` depths.

    At most `max_tokens` are read at once, or one text.
    """

    def first(part: GivenTexts, steps: Iterator[Tensor]) -> Tensor:
        return torch.stack(list(islice(steps, num_steps)), dim=1)

    states = _read_together(pair, texts, max_tokens, first)
    exists = torch.cat([_exists(each, num_steps) for each in texts.of_rows(texts.position)])
    return StatesByDepth(states.target, states.draft, exists.to(states.draft.device))


def _exists(positions: Tensor, num_steps: int) -> Tensor:
    """Return whether each of a response's states (n, num_steps) is of a round that begins within
    the response: those at `positions` (n,), of which the first is the prompt's last.
    """
    after = torch.arange(num_steps)
    begins = positions[:, None] - after  # the token before the round's first
    return (begins >= positions[:1]) & (begins >= 1)  # a pair has two tokens
