"""A recording of random responses, in the form that models would have left, and the rounds of a
replay in order.
"""

import numpy as np
import torch

from specheads.replay.recording import Recording
from specheads.replay.replay import Replayed


def random_recording(
    num_prompts=6, num_samples=2, max_tokens=8, acceptance=0.6, seed=0, longest=40
) -> Recording:
    """Return a recording whose features are random.

    `max_prob` rises with the chance that a token was accepted.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, longest, size=num_prompts)
    finished = rng.random(num_prompts) < 0.5
    limits = np.where(finished, lengths + rng.integers(1, 9, size=num_prompts), lengths)
    first = np.concatenate([[0], lengths.cumsum()[:-1]])
    total = int(lengths.sum())
    accepted = rng.random((num_samples, total)) < acceptance
    branch_first, branch_length = np.zeros((2, num_samples, total), dtype=np.int64)
    nodes = total
    for prompt in range(num_prompts):
        for sample in range(num_samples):
            for position in range(lengths[prompt]):
                place = sample, first[prompt] + position
                if not accepted[place]:
                    branch_first[place] = nodes
                    branch_length[place] = max(min(max_tokens, limits[prompt] - 1 - position), 0)
                    nodes += branch_length[place]
    good = np.concatenate([accepted.mean(axis=0), np.zeros(nodes - total)])
    noise = rng.random(nodes)
    features = {
        "max_prob": 0.1 + 0.4 * good + 0.4 * noise,
        "draft_prob": 0.05 + 0.5 * good + 0.4 * rng.random(nodes),
    }
    features["entropy"] = 2 - 1.5 * features["max_prob"]
    return Recording(
        prompts=[[0] * int(count) for count in rng.integers(2, 12, size=num_prompts)],
        first=torch.from_numpy(first),
        lengths=torch.from_numpy(lengths),
        limits=torch.from_numpy(limits),
        finished=torch.from_numpy(finished),
        accepted=torch.from_numpy(accepted),
        branch_first=torch.from_numpy(branch_first),
        branch_length=torch.from_numpy(branch_length),
        tokens=torch.zeros(nodes, dtype=torch.long),
        features={
            name: torch.from_numpy(values.astype(np.float32)) for name, values in features.items()
        },
        max_tokens=max_tokens,
    )


def rounds_of(rounds: Replayed, prompt: int, sample: int = 0) -> list[tuple[int, int, int]]:
    """Return a response's rounds in their order: drafted, accepted and emitted tokens."""
    rows = np.flatnonzero((rounds.prompt == prompt) & (rounds.sample == sample))
    rows = rows[np.argsort(rounds.start[rows])]
    return list(
        zip(
            *(column[rows].tolist() for column in (rounds.drafted, rounds.accepted, rounds.tokens)),
            strict=True,
        )
    )
