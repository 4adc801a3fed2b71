"""Recordings that a speculation profile describes: for simulations of a pair that is not here."""

from collections.abc import Sequence

import numpy as np
import torch

from specheads.decoding.stopping import MAX_TOKENS
from specheads.evaluation.speculation_profile import SetProfile
from specheads.replay.recording import Recording


def recording_of(profile: SetProfile, num_prompts: int, num_tokens: int, prompt_tokens: int, seed: int) -> Recording:
    """Return responses whose drafts are accepted as a profile says: a renewal process, in which every rejection starts anew.

    The number of accepted tokens before a rejection is at least k with the profile's survival of k, and geometric beyond the
    longest draft; so fixed lengths make as many tokens per round as in the profile, as far as the place in a draft decides. There
    are no features, so it serves policies that read none.

    Args:
        num_prompts: responses, one sample each.
        num_tokens: of every response.
        prompt_tokens: of every prompt.
    """
    rng = np.random.default_rng(seed)
    chances = np.array([each.value for each in profile.acceptance])
    accepted = torch.from_numpy(np.concatenate([_accepted(chances, num_tokens, rng) for _ in range(num_prompts)]))[None]
    first = torch.arange(num_prompts) * num_tokens
    left = num_tokens - 1 - torch.arange(num_tokens).repeat(num_prompts)  # tokens that may be drafted from a position on
    sizes = torch.full((num_prompts,), num_tokens)
    return Recording(
        prompt_ids=[f"{number:x}" for number in range(num_prompts)],
        prompts=[[0] * prompt_tokens for _ in range(num_prompts)],
        first=first,
        lengths=sizes,
        limits=sizes,
        finished=torch.zeros(num_prompts, dtype=torch.bool),
        accepted=accepted,
        branch_first=torch.zeros_like(accepted, dtype=torch.long),
        branch_length=torch.where(accepted, 0, left.clamp_max(MAX_TOKENS)),
        tokens=torch.zeros(num_prompts * num_tokens, dtype=torch.long),
        features={},
        max_tokens=MAX_TOKENS,
    )


def _accepted(chances: Sequence[float] | np.ndarray, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Return for each token of a response (num_tokens,) whether it is an accepted draft token."""
    accepted, place = np.zeros(num_tokens, dtype=bool), 0
    for position, uniform in enumerate(rng.random(num_tokens)):
        accepted[position] = uniform < chances[min(place, len(chances) - 1)]
        place = place + 1 if accepted[position] else 0
    return accepted
