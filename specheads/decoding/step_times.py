"""The measurer of step costs: a decoder's own steps, timed by themselves, in turn and many times
over, or counted from weights.

A few decoded rounds cannot tell what a head adds to a draft step. Draft steps run several in a row
after a step of the target, so that weights come from where a decoder's do. Other processes only add
time, so a low quantile says what steps take without them.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specheads.decoding.decoder import Baseline, SpeculativeDecoder
from specheads.decoding.engine import compile_ahead
from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.decoding.stopping import FixedLength, StoppingRule
from specheads.heads.head import AcceptanceHead
from specheads.load import threads_by_load
from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import Pair

FEWEST = 8  # times that each step is timed, however slow it is
ENOUGH = 20  # times, of which an interval says something
IN_A_ROW = 4  # draft steps after each step of the target
LONGEST = 16  # drafted tokens of the longest verification
VERIFIED = (2, 4, 8, LONGEST)  # drafted tokens of the verifications that are timed
UNDISTURBED, NUM_RESAMPLES = (
    0.1,
    200,
)  # the quantile of times that others hardly touch, and the resamples of its interval
# Seconds of timing until its interval is first looked at, and then whenever they have doubled
FIRST_LOOK = 1.0
# Names of steps: draft steps with a rule that only counts, one such step, and a step of the target
# alone.
PLAIN = "draft"
FIRST = "first draft step"
TARGET = "target"

Step = Callable[[], object]
Taken = Mapping[
    str, Sequence[float]
]  # seconds of steps by name; all were repeated equally often, in turn


@dataclass(frozen=True)
class StepTimes:
    """The costs of steps, by medians, and what rules add to a draft step, by their name."""

    costs: StepCosts
    rules: Mapping[str, RuleCosts] = field(default_factory=dict)

    def share(self, rule: str) -> float:
        """Return what a rule adds to a draft step, as a share of the step."""
        return self.rules[rule].step_seconds / self.costs.draft_seconds


def step_costs(
    draft: float,
    verification: Mapping[int, float],
    spread: Mapping[str, float],
    round_seconds: float = 0.0,
) -> StepCosts:
    """Return costs from the seconds of a draft step and of verifications, by drafted tokens from 0.

    Linear between those.
    """
    sizes, seconds = zip(*sorted(verification.items()), strict=True)
    filled = np.interp(range(sizes[-1] + 1), sizes, seconds).tolist()
    more = max(0.0, filled[-1] - filled[-2]) if len(filled) > 1 else 0.0
    return StepCosts(draft, filled[0], more, round_seconds, tuple(filled), spread)


@torch.no_grad()
def step_times(
    decoder: SpeculativeDecoder,
    rules: Mapping[str, StoppingRule],
    context: int = 256,
    repeats: int = 40,
    verified: Sequence[int] = VERIFIED,
    patience: float = math.inf,
    advance: Callable[[int], object] = lambda repeats: None,
) -> StepTimes:
    """Return the times of steps of a decoder of chains, and what `rules`, by name, would add to its
    draft steps.

    There are `context` positions in memory, and `verified` drafted tokens are verified. Steps are
    timed up to `repeats` times, slow ones not after `patience` seconds; `advance` is called with 1
    after each repeat.
    """
    taken = _taken(
        decoder, rules, context, verified, repeats=repeats, patience=patience, advance=advance
    )
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    spread = {
        name: statistics.mean(taken[name]) / seconds[name] for name in taken if name not in rules
    }
    return _costs(
        seconds, {name: seconds[name] - seconds[PLAIN] for name in rules}, verified, spread
    )


Ends = Sequence[
    StepTimes
]  # at the low end of their plausible range, in the middle, and at the high end


@torch.no_grad()
def step_time_ends(
    decoder: SpeculativeDecoder,
    rules: Mapping[str, StoppingRule],
    context: int,
    patience: float,
    enough: Callable[[Ends], bool],
) -> Ends:
    """Return what steps take without other processes, timed until that is `enough` or `patience` is
    over; see `step_times`.
    """
    until = {
        "repeats": 10**9,
        "patience": patience,
        "enough": lambda taken: enough(ends_of(taken, rules)),
    }
    return ends_of(_taken(decoder, rules, context, VERIFIED, **until), rules)


def ends_of(taken: Taken, rules: Iterable[str]) -> Ends:
    """Return the 95 % interval of all ratios to the target's step, by a low quantile, over
    resamples of the repeats.
    """
    count = len(taken[TARGET])
    repeats = np.vstack(
        [np.arange(count), np.random.default_rng(0).integers(count, size=(NUM_RESAMPLES, count))]
    )
    steps = {
        name: np.quantile(np.array(seconds)[repeats], UNDISTURBED, axis=-1)
        for name, seconds in taken.items()
    }
    steps |= {
        name: steps[name] - steps[PLAIN] for name in rules
    }  # what a rule adds has an interval that is not the step's
    ratios = {name: seconds / steps[TARGET] for name, seconds in steps.items()}
    ends = {
        name: [*np.quantile(ratio[1:], (0.025, 0.975)), ratio[0]] for name, ratio in ratios.items()
    }  # low, high, middle
    parts = [
        {name: float(each[end] * steps[TARGET][0]) for name, each in ends.items()}
        for end in (0, 2, 1)
    ]
    return [_costs(part, {name: part[name] for name in rules}, VERIFIED, {}) for part in parts]


def _costs(
    seconds: Mapping[str, float],
    added: Mapping[str, float],
    verified: Iterable[int],
    spread: Mapping[str, float],
) -> StepTimes:
    """Return the costs of steps from their seconds by name, and from those that rules add to a
    draft step.
    """
    # What the first step takes more than others, whose weights are in the cache, is an overhead of
    # its round.
    later = max(0.1 * seconds[PLAIN], (IN_A_ROW * seconds[PLAIN] - seconds[FIRST]) / (IN_A_ROW - 1))
    verification = {0: seconds[TARGET]} | {
        count: seconds[f"{count} verified"] for count in verified
    }
    rules = {name: RuleCosts(max(0.0, each)) for name, each in added.items()}
    return StepTimes(
        step_costs(later, verification, spread, max(0.0, seconds[FIRST] - later)), rules
    )


def _taken(
    decoder: SpeculativeDecoder,
    rules: Mapping[str, StoppingRule],
    context: int,
    verified: Sequence[int],
    **until: Any,
) -> Taken:
    decoders = {
        name: decoder.with_stopping(rule)
        for name, rule in {PLAIN: FixedLength(LONGEST), **rules}.items()
    }
    alone = Baseline(decoder.pair, decoder.warp, decoder.target_engine)
    makers = [*(each.prepare for each in decoders.values()), alone.prepare]
    compile_ahead(makers)
    for prepare in makers:
        prepare()
    first = alone.target_step(context)
    drafts = {name: each.draft_steps(IN_A_ROW, context) for name, each in decoders.items()}
    others = {TARGET: first, FIRST: decoders[PLAIN].draft_steps(1, context)}
    others |= {
        f"{count} verified": decoders[PLAIN].verification_step(count, context) for count in verified
    }
    with threads_by_load():  # as decoding does; but steps are compiled for all threads
        return _timed(first, drafts, others, device=decoder.pair.target_lm.device, **until)


def _timed(
    first: Step,
    drafts: Mapping[str, Step],
    others: Mapping[str, Step],
    repeats: int,
    patience: float,
    device: torch.device,
    enough: Callable[[Taken], bool] = lambda taken: False,
    advance: Callable[[int], object] = lambda repeats: None,
) -> dict[str, list[float]]:
    """Return the seconds of steps, each timed after the step `first`, until `patience` is over or
    they are `enough`.
    """
    steps = {**drafts, **others}
    taken = {name: list[float]() for name in steps}
    order = random.Random(0)
    began = now(device)
    look = FIRST_LOOK
    for repeat in range(repeats):
        passed = now(device) - began
        if repeat >= FEWEST and passed > patience:  # slow steps vary less
            break
        if repeat >= ENOUGH and passed > look:
            look *= 2
            if enough(taken):
                break
        for name in order.sample(list(taken), len(taken)):
            first()
            start = now(device)
            steps[name]()
            taken[name].append((now(device) - start) / (IN_A_ROW if name in drafts else 1))
        advance(1)
    return taken


def now(device: torch.device) -> float:
    """Return the time once the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def counted_ratios(pair: Pair) -> tuple[float, float]:
    """Return the least and the largest number of draft steps that a forward pass of the target may
    cost, counted.
    """
    target = pair.target_lm
    draft = pair.draft_lm
    # Layers decide for small models; weights and their bytes, each read and multiplied by once per
    # token, do for large ones.
    sizes = zip(_size(_step_weights(target)), _size(_step_weights(draft)), strict=True)
    layers = target.config.num_hidden_layers / draft.config.num_hidden_layers
    return min(ratios := [layers, *(ours / theirs for ours, theirs in sizes)]), max(ratios)


def counted_share(head: AcceptanceHead, draft: LanguageModel) -> float:
    """Return the cost of a head as a share of a draft step: the larger of its shares of
    multiply-adds and of bytes of weights.
    """
    # Attention over earlier tokens and launches are left out; all experts of a mixture count as
    # used.
    (head_count, head_bytes) = _size(head.parameters())
    (draft_count, draft_bytes) = _size(_step_weights(draft))
    return max(head_count / draft_count, head_bytes / draft_bytes)


def _step_weights(model: LanguageModel) -> list[Tensor]:
    """Return the weights that a step multiplies by: all except tables in which it looks up one
    row.
    """
    output = model.output_embedding.weight
    tables = {part.weight for part in model.model.modules() if isinstance(part, nn.Embedding)} - {
        output
    }
    return [weight for weight in model.model.parameters() if weight not in tables]


def bytes_of_step(model: LanguageModel) -> tuple[int, int]:
    """Return the bytes of weights that a step reads, and of the output's among them."""
    return _size(_step_weights(model))[1], model.output_embedding.weight.nbytes


def _size(weights: Iterable[Tensor]) -> tuple[int, int]:
    sizes = [(weight.numel(), weight.numel() * weight.element_size()) for weight in weights]
    return sum(count for count, _ in sizes), sum(size for _, size in sizes)
