"""Rollouts: drafts from random positions of given responses, with the acceptance probability of each of their tokens.

In the middle of a round the draft continues the tokens that it has drafted, not the target's. Labels along responses do not cover
such contexts; rollouts do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.branches import Branches, ReadTexts
from specheads.pair.padding import SLICE_ELEMENTS, batches_of_rows, right_padded, slices
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, accept_prob, check_finite


@dataclass(frozen=True)
class Rollouts:
    """The columns of one response: the number of response tokens before each rollout, and lists over the tokens of each.

    `accept_prob` is token verification's `min(1, t / d)`.
    """

    rollout_start: list[int]
    rollout_ids: list[list[int]]
    rollout_accept_prob: list[list[float]]


def rollout_uniforms(seed: int, prompt_id: str, sample: int, count: int, num_tokens: int) -> np.ndarray:
    """Return (count, 1 + num_tokens) uniform numbers for response `sample` to a prompt: for each rollout's start and tokens."""
    return np.random.default_rng([seed, int(prompt_id, 16), 2, sample]).random((count, 1 + num_tokens))


@torch.no_grad()
def roll_out(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    uniform: np.ndarray,
    warp: Warp,
    max_new_tokens: int,
    batch_size: int,
) -> list[Rollouts]:
    """Return the rollouts of each response; they start and end only where drafts of a decoder can.

    Args:
        prompts, responses: token ids per row; responses are not empty.
        uniform: (rows, R, 1 + K) in [0, 1), see `rollout_uniforms`; a rollout has up to K tokens.
        max_new_tokens: the limit at which responses end.
        batch_size: the number of rollouts that are drafted together.
    """
    _, count, width = uniform.shape
    results = [Rollouts([], [], []) for _ in responses]
    if not count:
        return results
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    for rows in batches_of_rows(lengths, max(1, batch_size // count)):
        limits = [min(max_new_tokens, pair.window - len(prompts[row])) for row in rows]
        # The token at the limit is the target's, so a draft starts, and ends, before it.
        places = np.array([min(len(responses[row]), limit - 1) for row, limit in zip(rows, limits, strict=True)])
        text = np.flatnonzero(places > 0).repeat(count)
        uniforms = uniform[rows][places > 0].reshape(len(text), width)
        start = (uniforms[:, 0] * places[text]).astype(np.int64)
        most = (np.array(limits)[text] - 1 - start).clip(max=width - 1)
        prefix = np.array([len(prompts[row]) for row in rows])[text] + start
        texts = right_padded([[*prompts[row], *responses[row]][:-1] for row in rows])
        starts = _RolloutStarts(*map(torch.from_numpy, (text, prefix, most)))
        made = _rolled(pair, texts, starts, torch.from_numpy(uniforms[:, 1:]), warp, batch_size)
        for number, begin, *columns in zip(text.tolist(), start.tolist(), *made, strict=True):
            for known, value in zip(vars(results[rows[number]]).values(), (begin, *columns), strict=True):
                known.append(value)
    return results


@dataclass(frozen=True)
class _RolloutStarts:
    """Where rollouts start, (n,) each: the number of the text, the length of its prefix, and the rollout's largest length."""

    text: Tensor
    prefix: Tensor
    lengths: Tensor


def _rolled(pair: Pair, texts: Tensor, starts: _RolloutStarts, uniform: Tensor, warp: Warp, batch_size: int) -> list[list[list]]:
    """Return ids and probabilities, with a list per rollout each, of rollouts that continue prefixes of `texts`; see Branches."""
    if not len(starts.text):
        return [[], []]
    device = pair.draft_lm.device
    text, prefix, lengths, uniform = (value.to(device) for value in (starts.text, starts.prefix, starts.lengths, uniform))
    draft, target = ReadTexts.of(pair.draft_lm, texts), ReadTexts.of(pair.target_lm, texts)
    distribution = warp(pair.draft_lm.logits(draft.before(text, prefix)))
    check_finite(pair.draft_id, distribution)
    first_tokens = Branches(text, prefix, warp.draw(distribution, uniform[:, 0])[:, None], lengths)
    branches = draft.grow(pair, first_tokens, uniform, warp, batch_size * (texts.shape[1] + uniform.shape[1]))
    ids = [row[:length] for row, length in zip(branches.tokens.tolist(), branches.lengths.tolist(), strict=True)]
    accepted: list[list[float]] = []
    for (rows, draft_states), (_, target_states) in zip(
        draft.states(branches, batch_size), target.states(branches, batch_size), strict=True
    ):
        for part in slices(len(rows), pair.vocab_size * draft_states.shape[1], SLICE_ELEMENTS):
            distributions = []
            for lm, model_id, states in (
                (pair.draft_lm, pair.draft_id, draft_states),
                (pair.target_lm, pair.target_id, target_states),
            ):
                distributions.append(warp(lm.logits(states[part])).to(device))
                check_finite(model_id, distributions[-1])
            chosen = rows[part].to(device)
            tokens = branches.tokens[chosen, : distributions[0].shape[1], None]
            draft_probs, target_probs = (distribution.gather(-1, tokens).squeeze(-1) for distribution in distributions)
            values = accept_prob(target_probs, draft_probs).tolist()
            accepted += [row[:length] for row, length in zip(values, branches.lengths[chosen].tolist(), strict=True)]
    return [ids, accepted]
