"""The measurer of step costs: a decoder's own steps, timed by themselves, in turn and many times
over, until what they cost is known well.

A few decoded rounds cannot tell what a head adds to a draft step. Draft steps run several in a row
after a step of the target, so that weights come from where a decoder's do. Other processes only add
time, so a low quantile says what steps take without them. What is left to chance is known, too: the
same quantile of resampled repeats.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from specheads.decoding.decoder import Baseline, SpeculativeDecoder
from specheads.decoding.engine import compile_ahead
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.stopping import FixedLength, StoppingRule
from specheads.heads.head import AcceptanceHead
from specheads.load import threads_by_load
from specheads.pair.language_model import LanguageModel

CONTEXT = 256  # positions in the KV cache while steps are timed
FEWEST = 5  # times that each step is timed, however slow it is
ENOUGH = 20  # times, of which an interval says something
IN_A_ROW = 4  # draft steps after each step of the target
LONGEST = 16  # drafted tokens of the longest verification
# Drafted tokens of the verifications that are timed: seven tokens take a CPU's products of matrices
# half a step of the target longer than six.
VERIFIED = (1, 2, 4, 5, 6, 8, LONGEST)
UNDISTURBED = 0.1  # the quantile of times that others hardly touch
NUM_RESAMPLES = 200  # of the repeats
NARROW = 0.01  # half the width of the interval of a draft step, over the step, that is narrow
# Seconds of timing until its interval is first looked at, and then whenever they have doubled
FIRST_LOOK = 0.5
# Names of steps: draft steps with a rule that only counts, one such step, and a step of the target
# alone.
PLAIN = "draft"
FIRST = "first draft step"
TARGET = "target"
_VERIFIED = " verified"  # follows the number of drafted tokens

Step = Callable[[], object]
# Of steps by name, draft steps IN_A_ROW together; all were repeated equally often, in turn
Seconds = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class StepTimes:
    """The costs of steps, and the seconds that rules add to a draft step, by their name."""

    costs: StepCosts
    rules: Mapping[str, float] = field(default_factory=dict)

    def share(self, rule: str) -> float:
        """Return what a rule adds to a draft step, as a share of the step."""
        return self.rules[rule] / self.costs.draft_seconds

    def draft_seconds_of(self, rule: str) -> float:
        """Return the seconds of a draft step with a rule; one that is not known adds nothing."""
        return self.costs.draft_seconds + self.rules.get(rule, 0.0)


@dataclass(frozen=True)
class TimedSteps:
    """The estimate of what steps cost, and as it would be from resampled repeats."""

    estimate: StepTimes
    resamples: Sequence[StepTimes] = ()

    @classmethod
    def of(cls, seconds: Seconds, rules: Sequence[str]) -> "TimedSteps":
        """Return the costs of steps from their seconds, `rules` being the names of draft steps with
        rules.
        """
        count = len(seconds[TARGET])
        rng = np.random.default_rng(0)
        repeats = np.vstack([np.arange(count), rng.integers(count, size=(NUM_RESAMPLES, count))])
        undisturbed = {
            name: np.quantile(np.array(each)[repeats], UNDISTURBED, axis=-1)
            for name, each in seconds.items()
        }
        spread = {
            name: statistics.mean(each) / statistics.median(each)
            for name, each in seconds.items()
            if name not in rules
        }
        estimate, *resamples = (
            _times({name: float(each[row]) for name, each in undisturbed.items()}, rules, spread)
            for row in range(1 + NUM_RESAMPLES)
        )
        return cls(estimate, resamples)

    @property
    def is_narrow(self) -> bool:
        """Whether the costs of draft steps, over those of the target, hardly depend on chance."""
        for name in ("", *self.estimate.rules):
            shares = [
                each.draft_seconds_of(name) / each.costs.target_seconds for each in self.resamples
            ]
            low, middle, high = np.quantile(shares, (0.025, 0.5, 0.975))
            if (high - low) / 2 > NARROW * middle:
                return False
        return True

    def ratios(self) -> np.ndarray:
        """Return the cost ratio (1 + R,): the estimate, then the resamples."""
        return np.array([each.costs.ratio for each in (self.estimate, *self.resamples)])


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
    return StepCosts(
        draft,
        filled[0],
        verified_seconds=more,
        round_seconds=round_seconds,
        verification=tuple(filled),
        spread=spread,
    )


def _times(
    seconds: Mapping[str, float], rules: Sequence[str], spread: Mapping[str, float]
) -> StepTimes:
    """Return the costs of steps from their seconds by name, draft steps IN_A_ROW together."""
    plain = seconds[PLAIN] / IN_A_ROW
    # What the first step takes more than others, whose weights are in the cache, is an overhead of
    # its round.
    later = max(0.1 * plain, (seconds[PLAIN] - seconds[FIRST]) / (IN_A_ROW - 1))
    verification = {0: seconds[TARGET]}
    for name, each in seconds.items():
        if name.endswith(_VERIFIED):
            verification[int(name.removesuffix(_VERIFIED))] = each
    added = {name: max(0.0, seconds[name] / IN_A_ROW - plain) for name in rules}
    overhead = max(0.0, seconds[FIRST] - later)
    return StepTimes(step_costs(later, verification, spread, overhead), added)


@torch.no_grad()
def time_steps(
    decoder: SpeculativeDecoder,
    rules: Mapping[str, StoppingRule],
    context: int = CONTEXT,
    *,
    repeats: int | None = None,
    patience: float = float("inf"),
    verified: Sequence[int] = VERIFIED,
    later: Sequence[SpeculativeDecoder] = (),
    advance: Callable[[float], object] = lambda seconds: None,
) -> dict[str, list[float]]:
    """Return the seconds of steps of a decoder of chains, and of draft steps with `rules`, by name.

    Steps are timed in turn until `patience` seconds are over.

    Args:
        context: positions in the KV cache.
        repeats: at most so many times; None: until `TimedSteps.is_narrow`.
        verified: numbers of drafted tokens whose verification is timed.
        later: decoders that generate afterwards, whose steps are compiled along with those that
            are timed.
        advance: is called after each repeat, with its seconds.

    Raises:
        UserError: for a decoder whose drafts are not chains.
    """
    plain = decoder.with_stopping(FixedLength(LONGEST))
    with_rules = {name: decoder.with_stopping(rule) for name, rule in rules.items()}
    alone = Baseline(decoder.pair, decoder.warp, decoder.target_engine)
    prepare: list[Step] = [partial(plain.prepare_repeated, verified), alone.prepare]
    prepare += [each.prepare_repeated for each in with_rules.values()]
    compile_ahead([*prepare, *(each.prepare for each in later)])
    for prepare_step in prepare:
        prepare_step()
    target = alone.target_step(context)
    steps: dict[str, Step] = {PLAIN: plain.draft_steps(IN_A_ROW, context)}
    for name, each in with_rules.items():
        steps[name] = each.draft_steps(IN_A_ROW, context)
    steps[FIRST] = plain.draft_steps(1, context)
    steps[TARGET] = target
    for count in verified:
        steps[f"{count}{_VERIFIED}"] = plain.verification_step(count, context)

    def is_enough(taken: Seconds) -> bool:
        return repeats is None and TimedSteps.of(taken, list(rules)).is_narrow

    device = decoder.pair.target_lm.device
    with threads_by_load():  # as decoding does; but steps are compiled for all threads
        return repeated(target, steps, lambda: now(device), repeats, patience, is_enough, advance)


def repeated(
    first: Step,
    steps: Mapping[str, Step],
    clock: Callable[[], float],
    repeats: int | None,
    patience: float,
    is_enough: Callable[[Seconds], bool] = lambda taken: False,
    advance: Callable[[float], object] = lambda seconds: None,
) -> dict[str, list[float]]:
    """Return the seconds of steps by `clock`, each timed after the step `first`, until `patience`
    is over or they are enough.
    """
    taken = {name: list[float]() for name in steps}
    order = random.Random(0)
    began = clock()
    look = FIRST_LOOK
    for repeat in range(sys.maxsize if repeats is None else repeats):
        passed = clock() - began
        if repeat >= FEWEST and passed > patience:  # slow steps vary less
            break
        if repeat >= ENOUGH and passed > look:
            look *= 2
            if is_enough(taken):
                break
        repeat_began = clock()
        for name in order.sample(list(taken), len(taken)):
            first()
            start = clock()
            steps[name]()
            taken[name].append(clock() - start)
        advance(clock() - repeat_began)
    return taken


def now(device: torch.device) -> float:
    """Return the time once the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
