"""What users and operators see of a simulation: throughput, speed per user, latencies, and what drafts came to."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from specheads.evaluation.intervals import Interval
from specheads.evaluation.latencies import milliseconds
from specheads.evaluation.serving.simulation import Served
from specheads.evaluation.serving.traffic import Traffic

# Quantiles of Student's t for 95 % intervals, by degrees of freedom from 1; with more, those of the normal distribution nearly.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
NORMAL = 1.96


@dataclass(frozen=True)
class ServingResult:
    """One policy on one traffic. Milliseconds per token are of whole requests, after their first round."""

    tokens_per_second: float  # of all requests together
    user_tokens_per_second: float  # of one request while it is in the batch, the median
    token_ms_p50: float
    token_ms_p90: float
    token_ms_p99: float
    first_token_ms_p50: float  # from the arrival to the end of the first round
    first_token_ms_p90: float
    first_token_ms_p99: float
    block_efficiency: float  # tokens per request and step of the target
    discard_rate: float  # drafted tokens that were not accepted, per emitted token
    rejected_rate: float  # those of them that were submitted
    draft_steps: float  # per round
    submitted: float  # per request and round


def result_of(served: Served, traffic: Traffic, lengths: np.ndarray) -> ServingResult:
    """Return the results of a simulation; `lengths` (P,) are those of the recorded responses.

    In a closed loop only what happens as long as requests wait is counted, because after that the batch empties. Requests that
    were under way at the start have no latencies.
    """
    end = served.admitted.max() if traffic.arrivals is None else np.inf
    rounds = [each for each in served.rounds if each.end <= end]
    decoding = [each for each in rounds if each.requests]
    steps, drafted, submitted, accepted, tokens, requests = (
        sum(getattr(each, name) for each in decoding)
        for name in ("steps", "drafted", "submitted", "accepted", "tokens", "requests")
    )
    whole = (traffic.starts == 0) & (served.finished <= end)
    emitted = lengths[traffic.prompts[whole]]
    arrived, admitted, first, finished = (
        values[whole] for values in (served.arrived, served.admitted, served.first_token, served.finished)
    )
    later = emitted > 1
    per_token = (finished - first)[later] / (emitted[later] - 1)
    numbers = {
        "tokens_per_second": tokens / rounds[-1].end,
        "user_tokens_per_second": float(np.median(emitted / (finished - admitted))),
        **_percentiles("token_ms", per_token),
        **_percentiles("first_token_ms", first - arrived),
        "block_efficiency": tokens / requests,
        "discard_rate": (drafted - accepted) / tokens,
        "rejected_rate": (submitted - accepted) / tokens,
        "draft_steps": steps / len(decoding),
        "submitted": submitted / requests,
    }
    return ServingResult(**numbers)


def _percentiles(name: str, seconds: np.ndarray) -> dict[str, float]:
    return {f"{name}_{level}": value for level, value in milliseconds(seconds).items()}


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean over seeds with its 95 % interval by Student's t; a single value has no width."""
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return Interval(mean, mean, mean)
    quantile = STUDENT[count - 2] if count - 2 < len(STUDENT) else NORMAL
    half = quantile * float(np.std(values, ddof=1)) / count**0.5
    return Interval(mean, mean - half, mean + half)


def over_seeds(results: Sequence[ServingResult]) -> dict[str, Interval]:
    """Return every number of the results of several seeds as a mean with its interval, by name."""
    return {field.name: mean_interval([getattr(each, field.name) for each in results]) for field in fields(ServingResult)}


def gain(ours: Sequence[ServingResult], theirs: Sequence[ServingResult]) -> Interval:
    """Return the ratio of total throughputs over seeds, which both share; 1 is equal."""
    return mean_interval([a.tokens_per_second / b.tokens_per_second for a, b in zip(ours, theirs, strict=True)])
