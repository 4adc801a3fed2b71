"""What a probe times besides steps: a few prompts decoded as a check, and the steps of a target that runs on a server.

Steps on a server are timed by differences between requests, so that what every request costs cancels. The server runs no draft,
so draft steps and the rules are not measured: a draft step is taken as a share of a target step.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specheads.decoding.records import DecodeStats
from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.decoding.step_times import TARGET, VERIFIED, StepTimes, step_costs
from specheads.evaluation.candidates import TARGET_ALONE, fixed_length
from specheads.evaluation.probe.prediction import Overheads
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.sweep import Sweep
from specheads.integrations.served_target import ServedModel
from specheads.pair.pair import Pair


@dataclass(frozen=True)
class LiveCheck:
    """What decoding some prompts took, with the target alone and with one fixed length, in turn."""

    num_prompts: int
    length: int  # drafted tokens
    alone_tokens_per_second: float
    tokens_per_second: float
    overheads: Overheads

    @property
    def speedup(self) -> float:
        """The speed-up of the fixed length over the target alone."""
        return self.tokens_per_second / self.alone_tokens_per_second


def live_check(pair: Pair, prompts: Sequence[Sequence[int]], costs: StepCosts, length: int, how: Evaluation) -> LiveCheck:
    """Decode prompts (ids) with the target alone and with a fixed length, and return what it took.

    Overheads are medians over rounds of what they took more than their steps.
    """
    measured = Sweep(pair, how).run([TARGET_ALONE, fixed_length(length)], prompts)
    verify, rounds = costs.verification, [[numbers for prompt in each.rounds for numbers in prompt] for each in measured]
    more = [
        draft + target - calls * costs.draft_seconds - verify[min(int(drafted), len(verify) - 1)]
        for _, drafted, calls, draft, target in rounds[1]
    ]
    alone = statistics.median(draft + target for *_, draft, target in rounds[0])
    overheads = Overheads(max(0.0, statistics.median(more)), max(0.0, alone - costs.target_seconds))
    speed_alone, speed = (DecodeStats.total(each.stats).tokens_per_second for each in measured)
    return LiveCheck(len(prompts), length, speed_alone, speed, overheads)


MADE = 16  # tokens of the requests by which steps are timed
BLOCK = 16  # tokens that a server's cache of prefixes holds or drops together


def served_times(lm: ServedModel, ratio: float, rules: Iterable[str], context: int, repeats: int) -> StepTimes:
    """Return the times of steps of a server's target.

    Args:
        ratio: draft steps that a step of the target takes.
        rules: names of rules, which count as free.
        context: tokens of the texts that requests continue.
        repeats: times that each request is timed.
    """
    rng = random.Random(0)
    # Whole blocks, so that only what comes after them is read again.
    text = [rng.randrange(lm.vocab_size) for _ in range(max(BLOCK, context // BLOCK * BLOCK))]

    def seconds(read: int, made: int) -> float:
        """Time a request that reads some tokens after the text and makes some."""
        ids = text + [rng.randrange(lm.vocab_size) for _ in range(read)]
        start = time.perf_counter()
        lm.server.complete(ids, {"max_tokens": made, "temperature": 0.0, "ignore_eos": True})
        return time.perf_counter() - start

    ways: dict[Any, Callable[[], float]] = {"first": lambda: seconds(1, 1), "long": lambda: seconds(1, 1 + MADE)}
    ways |= {count: lambda count=count: seconds(count + 1, 1) for count in VERIFIED}  # type: ignore[misc]
    taken: dict[Any, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # the text is read for the first time
    for _ in range(repeats):
        for name in rng.sample(list(ways), len(ways)):
            taken[name].append(ways[name]())
    median = {name: statistics.median(each) for name, each in taken.items()}
    target = (median["long"] - median["first"]) / MADE
    verification = {0: target} | {count: target + max(0.0, median[count] - median["first"]) for count in VERIFIED}
    costs = step_costs(target / ratio, verification, {TARGET: statistics.mean(taken["long"]) / median["long"]})
    return StepTimes(costs, dict.fromkeys(rules, RuleCosts()))
