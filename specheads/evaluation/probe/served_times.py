"""The seconds of a target's steps on a server, by differences between requests, so that what every request costs cancels.

The server runs no draft, so draft steps and the rules are not measured: a draft step is taken as a share of a target step.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from specheads.decoding.step_costs import RuleCosts
from specheads.decoding.step_times import TARGET, VERIFIED, StepTimes, step_costs
from specheads.integrations.served_target import ServedModel
from specheads.pair import Pair

MADE = 16  # tokens of the requests by which steps are timed
BLOCK = 16  # tokens that a server's cache of prefixes holds or drops together


def parameter_ratio(pair: Pair) -> float:
    """Return how many times as many parameters the target has as the draft."""
    target, draft = (sum(each.numel() for each in model.parameters()) for model in (pair.target, pair.draft))
    return target / draft


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
