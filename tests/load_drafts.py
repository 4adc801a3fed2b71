"""Drafts of a batch with given features, and a round of a policy on them."""

import numpy as np

from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.policy import drafting_rows


def drafts_of(features, lengths=None, prompt_tokens=0, capacity=None, requests=None, unread=1) -> Drafts:
    """Return drafts with features (R, K) by name; `lengths` default to K."""
    num_requests, width = np.shape(next(iter(features.values())))
    full, drafted_lengths = np.full(num_requests, width), np.full(num_requests, width)
    return Drafts(
        np.arange(num_requests) if requests is None else np.array(requests),
        drafted_lengths if lengths is None else np.array(lengths),
        full if capacity is None else np.array(capacity),
        np.full(num_requests, unread),
        {name: np.array(values, dtype=np.float64) for name, values in features.items()},
        prompt_tokens,
    )


def drafted(policy, features, prompt_tokens=0, capacity=None, requests=None, unread=1) -> Drafts:
    """Return the drafts of a round in which a policy decides how deep each row goes; `features` are those of full drafts."""
    drafts = drafts_of(features, None, prompt_tokens, capacity, requests, unread)
    drafts.lengths[:] = 0
    most = policy.begin_round(drafts)
    for _ in range(np.shape(next(iter(features.values())))[1]):
        rows = drafting_rows(policy, drafts, np.zeros(drafts.num_requests, dtype=bool), most)
        if not rows.any():
            break
        drafts.lengths[rows] += 1
    return drafts


def blank(num_requests, width=8):
    """Return the features of drafts that no policy looks at."""
    return {"max_prob": np.full((num_requests, width), 0.5)}
