"""The requests of a simulation: which recorded responses, and when they arrive."""

from dataclasses import dataclass

import numpy as np

from specheads.errors import UserError
from specheads.replay.recording import Recording


@dataclass(frozen=True)
class Traffic:
    """Requests in the order in which they are served; arrays (n,). The same for every policy.

    `arrivals`: seconds; None for a closed loop, in which a request arrives as soon as there is a place in the batch.
    """

    prompts: np.ndarray
    samples: np.ndarray
    starts: np.ndarray  # response position; above 0: the request was under way before the simulation begins
    max_batch: int
    arrivals: np.ndarray | None = None


def closed_loop(recording: Recording, concurrency: int, num_requests: int, seed: int) -> Traffic:
    """Return requests of which `concurrency` are always under way.

    The first ones begin at random positions of their responses, so that requests do not end all at once.
    """
    if num_requests <= concurrency:
        raise UserError(f"num_requests={num_requests} must be more than the concurrency, {concurrency}.")
    rng, prompts, samples = _chosen(recording, num_requests, seed)
    starts = np.zeros(num_requests, dtype=np.int64)
    lengths = recording.lengths.numpy()[prompts[:concurrency]]
    starts[:concurrency] = (rng.random(concurrency) * lengths).astype(np.int64)
    return Traffic(prompts, samples, starts, concurrency)


def poisson(recording: Recording, rate: float, num_requests: int, max_batch: int, seed: int, burst: int = 1) -> Traffic:
    """Return requests that arrive in groups of `burst` at once, at `rate` requests per second in the mean."""
    if rate <= 0 or burst < 1:
        raise UserError(f"rate={rate} and burst={burst} must be positive; give requests per second, and requests at once.")
    rng, prompts, samples = _chosen(recording, num_requests, seed)
    groups = rng.exponential(burst / rate, size=-(-num_requests // burst)).cumsum()
    arrivals = np.repeat(groups, burst)[:num_requests]
    return Traffic(prompts, samples, np.zeros(num_requests, dtype=np.int64), max_batch, arrivals)


def _chosen(recording: Recording, num_requests: int, seed: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    """Return a generator, and the prompts and acceptance samples of the requests: every prompt about equally often."""
    rng = np.random.default_rng(seed)
    rounds = -(-num_requests // recording.num_prompts)
    prompts = np.concatenate([rng.permutation(recording.num_prompts) for _ in range(rounds)])[:num_requests]
    return rng, prompts, rng.integers(recording.num_samples, size=num_requests)
