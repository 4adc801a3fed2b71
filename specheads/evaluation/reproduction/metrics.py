"""What is measured of a method: ratios of sums over prompts, so that whole groups of prompts can be resampled."""

from dataclasses import dataclass, field

import numpy as np

from specheads.decoding.records import DecodeStats


@dataclass(frozen=True)
class Metric:
    """A ratio of sums, by the names of two columns of a Tally."""

    title: str
    above: str
    below: str
    exponential: bool = False  # of the ratio
    timed: bool = False  # whether it depends on the machine


METRICS = {
    "tokens_per_round": Metric("tokens per round", "num_tokens", "num_target_calls"),
    "acceptance_rate": Metric("accepted / drafted", "num_kept", "num_drafted"),
    "drafted_per_round": Metric("drafted per round", "num_drafted", "num_target_calls"),
    "perplexity": Metric("perplexity", "nats", "num_tokens", exponential=True),
    "discard_rate": Metric("discard rate", "num_discarded", "num_tokens"),
    "verification_rate": Metric("verification rate", "num_target_calls", "num_tokens"),
    "copied_rounds": Metric("rounds with a copy", "num_copy_rounds", "num_target_calls"),
    "tokens_per_draft_step": Metric("tokens per draft step", "num_tokens", "steps"),
    "tokens_per_second": Metric("tokens per second", "num_tokens", "decode_seconds", timed=True),
}


@dataclass
class Tally:
    """What a method did with each prompt; `ratio`: the draft steps that a forward pass of the target takes."""

    ratio: float
    stats: list[DecodeStats] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)  # the negative log-likelihood of each response under the target

    def column(self, name: str) -> np.ndarray:
        """Return the numbers of the prompts (P,)."""
        if name == "nats":
            return np.array(self.nats)
        if name == "num_kept":  # drafted tokens that were accepted: without copies, which cost the draft nothing
            return self.column("num_drafted") - self.column("num_discarded")
        if name == "steps":
            return self.column("num_draft_calls") + self.ratio * self.column("num_target_calls")
        return np.array([getattr(stats, name) for stats in self.stats], dtype=float)

    def rows(self, name: str) -> np.ndarray:
        """Return the numbers whose sums a metric divides, (2, P)."""
        return np.stack([self.column(METRICS[name].above), self.column(METRICS[name].below)])

    def samples(self, name: str, counts: np.ndarray) -> np.ndarray | None:
        """Return a metric (1 + R,) under each row of `counts` (1 + R, P); None where it does not apply, as without a draft."""
        above, below = self.rows(name) @ counts.T
        if not below.all():
            return None
        return np.exp(above / below) if METRICS[name].exponential else above / below
