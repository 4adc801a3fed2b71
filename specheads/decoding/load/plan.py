"""How deep a batch should draft, from the survival of drafts of other prompts and from what steps cost."""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from specheads.decoding.load.costs import POSITIONS, LoadCosts
from specheads.errors import UserError

# Numbers of positions that plans tell apart, a quarter from one to the next, and the largest number that each stands for.
POSITION_STEPS = [round(1.25**power) for power in range(100)]
LARGEST_OF_STEPS = [int(1.25 ** (power + 0.5)) for power in range(100)]

POSITIONS_TRIED = (0, 128, 512, 2048)  # of each request


@dataclass(frozen=True)
class SurvivalSample:
    """The survival (M, K) of M drafts of dev prompts, as it was predicted before each token was sampled.

    It stands for the survival of the drafts of any batch before they are drafted.

    Raises:
        UserError: no drafts, or values that are no probabilities.
    """

    survival: np.ndarray

    def __post_init__(self) -> None:
        """Check the values."""
        values = self.survival
        if values.ndim != 2 or not values.size or not ((values >= 0) & (values <= 1)).all():
            raise UserError(f"a sample of survival with shape {values.shape} must be probabilities of at least one draft.")

    @cached_property
    def gains(self) -> list[np.ndarray]:
        """By depth 0 to K, the mean gain of a row for 0, 1/M, 2/M, ... tokens per row, those with the most survival first."""
        reached = np.minimum.accumulate(self.survival, axis=1)
        sums = [-np.sort(-reached[:, :depth].ravel()) for depth in range(reached.shape[1] + 1)]
        return [np.concatenate([[0.0], values.cumsum()]) / len(reached) for values in sums]

    def gain(self, depth: int, num_requests: int) -> np.ndarray:
        """Return the expected accepted tokens of a batch that submits 0, 1, ... of its `num_requests` x depth tokens."""
        curve, submitted = self.gains[depth], np.arange(num_requests * depth + 1)
        return num_requests * np.interp(submitted / num_requests, np.arange(len(curve)) / len(self.survival), curve)

    @cached_property
    def mean(self) -> np.ndarray:
        """The mean survival by place, (K,)."""
        return self.survival.mean(axis=0)


@dataclass(frozen=True)
class Plan:
    """How a round is drafted: `depth` tokens per row, and the throughput (tokens per second) at which seconds are valued.

    `accepted`: the tokens that are expected to be; `worth`: these less the value of what drafting and verifying them takes.
    `admits`: not all drafted tokens are submitted, so that their survival has to be predicted and weighed.
    `adaptive`: verification is free for all that may be drafted, so that depth may follow the drafts; `depth` is the most then.
    """

    depth: int
    throughput: float
    accepted: float = 0.0
    worth: float = 0.0
    admits: bool = False
    adaptive: bool = False


@dataclass
class Planner:
    """Plans rounds from the number of requests, of tokens in flight and of positions in memory; equal rounds are planned once.

    Positions count in steps of a quarter, so that a round is not another one for a few more of them.

    The throughput that seconds are valued at is the highest that any depth reaches at this number of requests, without prompts:
    the seconds of reading prompts are the same whatever is drafted, so they do not make other seconds cheaper. With it a round is
    worth its expected tokens less its seconds' value (renewal reward, Dinkelbach 1967), and the depth of most worth is taken.

    `weighs`: whether tokens may be weighed; otherwise all that are drafted are submitted.
    """

    costs: LoadCosts
    sample: SurvivalSample
    max_tokens: int
    weighs: bool = True
    _gains: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    _throughputs: dict[tuple[int, int], float] = field(default_factory=dict)
    _plans: dict[tuple[int, int, int], Plan] = field(default_factory=dict)

    def plan(self, num_requests: int, prompt_tokens: int, positions: int = 0) -> Plan:
        """Return the plan of a round in which the target also reads `prompt_tokens` tokens of prompts."""
        key = num_requests, prompt_tokens, self._about(positions)
        if key not in self._plans:
            self._plans[key] = self._planned(*key)
        return self._plans[key]

    def _about(self, positions: int) -> int:
        """Return a number of positions that stands for all that differ by an eighth at most; 0 where memory costs nothing."""
        if not positions or not self._memory_costs:
            return 0
        return POSITION_STEPS[bisect_left(LARGEST_OF_STEPS, positions)]

    @cached_property
    def _memory_costs(self) -> bool:
        return any(getattr(self.costs, name) for name in POSITIONS)

    def _planned(self, num_requests: int, prompt_tokens: int, positions: int) -> Plan:
        throughput = self.throughput(num_requests, positions)
        best, nothing = Plan(0, throughput), -np.inf
        for depth in range(self.max_tokens + 1):
            gains, seconds = self._outcomes(num_requests, prompt_tokens, positions, depth)
            worths = gains - throughput * seconds
            number = int(np.argmax(worths))
            if not depth:
                nothing = worths[0]
            elif worths[number] - nothing > best.worth:
                admits = self.weighs and (number + 1 < len(worths) or not self.costs.weighing(num_requests))
                best = Plan(depth, throughput, float(gains[number]), float(worths[number] - nothing), admits)
        flat_until = 0 if positions and self.costs.target_attention else self.costs.envelope.flat_until
        free = (flat_until - prompt_tokens) // num_requests - 1
        if self.weighs and 0 < best.depth < free:
            return replace(best, depth=min(free, self.max_tokens), admits=False, adaptive=True)
        return best

    def throughput(self, num_requests: int, positions: int = 0) -> float:
        """Return the highest expected throughput of rounds with this number of requests, in tokens per second."""
        key = num_requests, self._about(positions)
        if key not in self._throughputs:
            rates = []
            for depth in range(self.max_tokens + 1):
                gains, seconds = self._outcomes(num_requests, 0, key[1], depth)
                rates.append(((num_requests + gains) / seconds).max())
            self._throughputs[key] = float(max(rates))
        return self._throughputs[key]

    def _outcomes(self, num_requests: int, prompt_tokens: int, positions: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the expected accepted tokens and the seconds of a round by how many tokens are submitted, (n + 1,) each.

        Submitting fewer than all takes the seconds of predicting and weighing them.
        """
        if (depth, num_requests) not in self._gains:
            self._gains[depth, num_requests] = self.sample.gain(depth, num_requests)
        gains = self._gains[depth, num_requests]
        in_flight = num_requests + prompt_tokens + np.arange(len(gains))
        seconds = self.costs.round_seconds(num_requests, depth, in_flight, positions)
        seconds[:-1] += self.costs.weighing(num_requests) if self.weighs else np.inf
        return gains, seconds

    def ever_weighs(self) -> bool:
        """Return whether any plan without prompts weighs tokens, at the numbers of requests that weighing was measured for."""
        if self.costs.admission is None:
            return True
        plans = [
            self.plan(requests, 0, requests * positions)
            for requests in self.costs.admission.sizes
            for positions in POSITIONS_TRIED
        ]
        return any(plan.admits or plan.adaptive for plan in plans)
