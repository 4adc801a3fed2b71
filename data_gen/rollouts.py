"""Drafts on the draft's own words, from random places of given responses, and how likely the target accepts each of their tokens.

What a draft proposes in the middle of a round follows what it proposed before, not what the target would have said. Labels along
responses miss that; these have it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.branches import Branches, ReadTexts
from specheads.padding import SLICE_ELEMENTS, batches_of_rows, right_padded, slices
from specheads.pair import Pair
from specheads.sampling import Warp, accept_prob, check_finite


@dataclass(frozen=True)
class Rollouts:
    """One response's columns: for each rollout the number of response tokens before it, and a list per column with a value per token.

    `accept_prob` is token verification's `min(1, t / d)`.
    """

    rollout_start: list[int]
    rollout_ids: list[list[int]]
    rollout_accept_prob: list[list[float]]


def rollout_uniforms(seed: int, prompt_id: str, sample: int, count: int, num_tokens: int) -> np.ndarray:
    """Return (count, 1 + num_tokens) uniform numbers of a prompt's response number `sample`: where each rollout starts, and its tokens."""
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
    on_step: Callable[[int, int], None] = lambda made, done: None,
) -> list[Rollouts]:
    """Return the rollouts of each response, which start where decoding would draft and end where it would at the latest.

    Args:
        prompts, responses: token ids per row; responses are not empty.
        uniform: (rows, R, 1 + K) in [0, 1), see `rollout_uniforms`; a rollout has up to K tokens.
        max_new_tokens: at which responses end.
        batch_size: rollouts drafted together.
        on_step: called after each batch with the tokens that were drafted and with R * K for each of its rows.
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
        draws = uniform[rows][places > 0].reshape(len(text), width)
        start = (draws[:, 0] * places[text]).astype(np.int64)
        most = (np.array(limits)[text] - 1 - start).clip(max=width - 1)
        prefix = np.array([len(prompts[row]) for row in rows])[text] + start
        texts = right_padded([[*prompts[row], *responses[row]][:-1] for row in rows])
        made = _rolled(pair, texts, *map(torch.from_numpy, (text, prefix, most, draws[:, 1:])), warp, batch_size)
        for number, begin, *columns in zip(text.tolist(), start.tolist(), *made, strict=True):
            for known, value in zip(vars(results[rows[number]]).values(), (begin, *columns), strict=True):
                known.append(value)
        on_step(sum(map(len, made[0])), len(rows) * count * (width - 1))
    return results


def _rolled(
    pair: Pair, texts: Tensor, text: Tensor, prefix: Tensor, lengths: Tensor, uniform: Tensor, warp: Warp, batch_size: int
) -> list[list[list]]:
    """Return ids and probabilities of rollouts (a list per column of a list per rollout) that go on from beginnings of `texts`; see Branches."""
    if not len(text):
        return [[], []]
    device = pair.draft_lm.device
    text, prefix, lengths, uniform = (value.to(device) for value in (text, prefix, lengths, uniform))
    draft, target = ReadTexts.of(pair.draft_lm, texts), ReadTexts.of(pair.target_lm, texts)
    distribution = warp(pair.draft_lm.logits(draft.before(text, prefix)))
    check_finite(pair.draft_id, distribution)
    begun = Branches(text, prefix, warp.draw(distribution, uniform[:, 0])[:, None], lengths)
    branches = draft.grow(pair, begun, uniform, warp, batch_size)
    ids = [row[:length] for row, length in zip(branches.tokens.tolist(), branches.lengths.tolist(), strict=True)]
    accepted: list[list[float]] = []
    for (rows, drafted_from), (_, judged_from) in zip(
        draft.states(branches, batch_size), target.states(branches, batch_size), strict=True
    ):
        for part in slices(len(rows), pair.vocab_size * drafted_from.shape[1], SLICE_ELEMENTS):
            distributions = []
            for lm, model_id, states in (
                (pair.draft_lm, pair.draft_id, drafted_from),
                (pair.target_lm, pair.target_id, judged_from),
            ):
                distributions.append(warp(lm.logits(states[part])).to(device))
                check_finite(model_id, distributions[-1])
            chosen = rows[part].to(device)
            tokens = branches.tokens[chosen, : distributions[0].shape[1], None]
            drafted, wanted = (distribution.gather(-1, tokens).squeeze(-1) for distribution in distributions)
            values = accept_prob(wanted, drafted).tolist()
            accepted += [row[:length] for row, length in zip(values, branches.lengths[chosen].tolist(), strict=True)]
    return [ids, accepted]
