"""Drafted tokens and their acceptance probabilities along given responses (SpecDec++, section 3.1).

Both models read prompt and response once; at every response position a token is sampled from the draft's distribution, and its
acceptance probability follows from both models' distributions there. Probabilities are in memory for a slice of positions at a
time, never for a whole response.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specheads.language_model import LanguageModel
from specheads.padding import SLICE_ELEMENTS, batches_of_tokens, right_padded, slices
from specheads.pair import Pair
from specheads.sampling import Warp, accept_prob, check_finite, overlap, sample

BATCH_TOKENS = 16_384  # padded tokens that a model reads at once


@dataclass(frozen=True)
class Labels:
    """The columns of one response: index i is response position i, and log-probabilities are those of the warped distributions.

    Where several tokens were sampled at each position, the columns `more_` have a list for each sample after the first.
    """

    draft_ids: list[int]
    accept_prob: list[float]
    overlap: list[float]
    draft_logprob: list[float]
    target_logprob: list[float]
    response_draft_logprob: list[float]
    response_target_logprob: list[float]
    more_draft_ids: list[list[int]]
    more_accept_prob: list[list[float]]


@torch.no_grad()
def label_responses(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    uniform: np.ndarray,
    warp: Warp,
) -> list[Labels]:
    """Return the labels of each response.

    Args:
        prompts, responses: token ids per row; responses are not empty.
        uniform: (B, samples, >= longest response) in [0, 1), one number per drafted token.
    """
    results: dict[int, Labels] = {}  # by row
    for rows in batches_of_tokens([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)], BATCH_TOKENS):
        texts = [[*prompts[row], *responses[row]] for row in rows]
        where = torch.cat(
            [
                torch.stack([torch.full((len(responses[row]),), i), torch.arange(len(prompts[row]), len(texts[i]))])
                for i, row in enumerate(rows)
            ],
            dim=1,
        )
        uniforms = np.concatenate([uniform[row, :, : len(responses[row])] for row in rows], axis=1)
        columns = _columns(pair, texts, where, torch.from_numpy(uniforms), warp)
        ends = np.cumsum([len(responses[row]) for row in rows])[:-1]
        for row, *parts in zip(rows, *(np.split(column, ends, axis=-1) for column in columns), strict=True):
            results[row] = Labels(*(part.tolist() for part in parts))
    return [results[row] for row in range(len(prompts))]


def _columns(pair: Pair, texts: list[list[int]], where: Tensor, uniforms: Tensor, warp: Warp) -> list[np.ndarray]:
    """Return Labels' columns, (N,) or for `more_` (samples - 1, N), of the positions `where` (2, N) = (row, index in the text).

    `uniforms` (samples, N) are the numbers that decide the drafted tokens.
    """
    tokens = right_padded(texts)
    row, index = where
    target_hidden = _states(pair.target_lm, tokens, row, index - 1)
    draft_hidden = _states(pair.draft_lm, tokens, row, index - 1)
    response = tokens[row, index]
    parts = []
    for piece in slices(len(row), pair.vocab_size, SLICE_ELEMENTS):
        target_probs = warp(pair.target_lm.logits(target_hidden[piece]))
        draft_probs = warp(pair.draft_lm.logits(draft_hidden[piece]))
        check_finite(pair.target_id, target_probs)
        check_finite(pair.draft_id, draft_probs)
        draft_probs = draft_probs.to(target_probs.device)
        drafted = torch.stack([sample(draft_probs, numbers) for numbers in uniforms[:, piece]])
        chosen = torch.cat([drafted, response[piece].to(drafted.device)[None]]).T
        target, draft = target_probs.gather(1, chosen).T, draft_probs.gather(1, chosen).T
        accepted = accept_prob(target[:-1], draft[:-1])
        columns = [drafted[0], accepted[0], overlap(target_probs, draft_probs), draft[0].log(), target[0].log()]
        columns += [draft[-1].log(), target[-1].log(), drafted[1:], accepted[1:]]
        parts.append([column.cpu().numpy() for column in columns])
    return [np.concatenate(column, axis=-1) for column in zip(*parts, strict=True)]


def _states(lm: LanguageModel, tokens: Tensor, row: Tensor, index: Tensor) -> Tensor:
    """Return hidden states (N, H) at the positions (row, index) of right-padded `tokens` (B, T)."""
    hidden = lm.hidden_states(tokens.to(lm.device), use_cache=False)
    return hidden[row.to(hidden.device), index.to(hidden.device)]
