"""What each way to decode would be worth, and the answer, from recorded prompts and measured steps.

Chosen on other prompts.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.stopping import MAX_TOKENS, FixedLength, Logistic
from specheads.evaluation.candidates import (
    CEILING,
    FIXED,
    ORACLE_BOUND,
    Candidate,
    CostTable,
    RuleChoice,
    Tuning,
    candidates,
)
from specheads.evaluation.conclusions import change, times
from specheads.evaluation.keys import MEASURED
from specheads.evaluation.replayed_sets import RecordedSet, chosen, counts_of
from specheads.load import adapt_threads, threads_by_load
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts, read
from specheads.pair.sampling import Warp, check_finite, overlap
from specheads.progress import Advance
from specheads.replay.intervals import Interval, interval, resample_counts
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts

PLAIN = "the target alone"
FIXED_NAME = "fixed length"
LOGISTIC = "logistic"
BETTER = "a better draft"
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(2, 20))
RULES = {
    FIXED: RuleChoice(FixedLength, {"num_tokens": list(LENGTHS)}),
    LOGISTIC: RuleChoice(
        Logistic,
        {
            "threshold": list(THRESHOLDS),
            "weights": {"logit_max_prob": None, "bias": None},
            "max_tokens": MAX_TOKENS,
        },
    ),
}
FIXED_LENGTHS = candidates({FIXED: RULES[FIXED]}, {}, None)
# Of the way from the best fixed length to the informed ceiling, what trained heads closed on mini
# at ratios 5 to 20, with less than 1 % of a draft step for their cost, by whether decoding is
# greedy: the least and the most on two sets of prompts, and a value between them
# (docs/measurements/archive.md, what rules are worth). A probe of mini is therefore no test of
# them.
HEAD_SHARES = {False: (0.29, 0.32, 0.37), True: (0.38, 0.43, 0.52)}
MORE_OVERLAP = 0.1  # half of what distillation added to the overlap of nano's and mini's drafts

LARGEST_ERROR = 1.25  # a prediction may be off by so much from a few decoded prompts
# Of speed, what a more complicated way to decode must gain over the simpler one. Decoded next to
# predicted gains of the embedded pairs (docs/measurements/archive.md): rules and heads 2 to 6 %
# less.
NOTICEABLE = 0.01
WORTH_A_RULE = 0.05
WORTH_TRAINING = 0.05
WORTH_DISTILLING = 0.05


def head_name(width: int) -> str:
    """Return the name of the option of a head."""
    return f"head of width {width}"


@threads_by_load()
@torch.no_grad()
def agreement(
    pair: Pair,
    recording: Recording,
    warp: Warp,
    advance: Advance = lambda prompts: None,
) -> tuple[Tensor, Tensor]:
    """Return how far a pair agrees before each token of a recording's responses, (N,) each:
    the overlap of both distributions, and the target's probability of tokens that the draft never
    proposes.

    `advance` is called per response.
    """
    device = pair.draft_lm.device
    lacking = pair.draft_lm.lacking
    overlaps = list[Tensor]()
    unknown = list[Tensor]()
    for number, prompt in enumerate(recording.prompts):
        adapt_threads()
        states = read(pair, GivenTexts.with_responses([prompt], [recording.response(number)]))
        draft = warp(pair.draft_lm.logits(states.draft))
        target = warp(pair.target_lm.logits(states.target)).to(device)
        check_finite(pair.draft_id, draft)
        check_finite(pair.target_id, target)
        overlaps.append(overlap(target, draft).double().cpu())
        lost = torch.zeros(len(target)) if lacking is None else target[:, lacking].sum(dim=1)
        unknown.append(lost.double().cpu())
        advance(1)
    return torch.cat(overlaps), torch.cat(unknown)


def better_draft(recording: Recording, gain: float) -> Recording:
    """Return the recording of a draft whose tokens are accepted more often by a share `gain`, for
    fixed lengths only.
    """
    runs = recording.branch_accepted
    accepted = recording.accepted if runs is None else recording.labels().accepted
    share = accepted.double().mean().item()
    flipped = min(1.0, share * gain / max(1e-9, 1 - share))
    generator = torch.Generator().manual_seed(0)
    is_flipped = torch.rand(recording.accepted.shape, generator=generator) < flipped
    if runs is None:
        return replace(recording, accepted=recording.accepted | is_flipped)
    longer = _longer(recording, runs, is_flipped)
    lengths = recording.branch_length.maximum(longer)
    return replace(recording, branch_accepted=longer, branch_length=lengths)


def _longer(recording: Recording, runs: Tensor, is_flipped: Tensor) -> Tensor:
    """Return how many tokens of each draft (Q, N) are accepted, of `runs` (Q, N) before, where the
    first rejected one is accepted if its place `is_flipped` (Q, N): the draft then goes on as the
    one that begins after it.
    """
    num_tokens = runs.shape[1]
    # One place more, so that every place has one after it
    longer = torch.nn.functional.pad(runs, (0, 1))
    sample = torch.arange(len(runs))
    ends = (recording.first + recording.lengths).repeat_interleave(recording.lengths)
    for start in reversed(range(num_tokens)):
        rejected = start + runs[:, start]
        is_within = rejected < ends[start]
        place = rejected.clamp_max(num_tokens - 1)
        after = longer[sample, place + 1].where(rejected + 1 < ends[start], 0)
        longer[:, start] += torch.where(is_within & is_flipped[sample, place], 1 + after, 0)
    limits = (recording.first + recording.limits).repeat_interleave(recording.lengths)
    most = limits - 1 - torch.arange(len(limits))  # the last token is the target's
    return longer[:, :-1].minimum(most.clamp_max(recording.max_tokens))


@dataclass(frozen=True)
class LiveCheck:
    """What decoding took with the target alone and with a fixed length, and what is predicted."""

    num_prompts: int
    length: int  # drafted tokens
    alone_tokens_per_second: float
    tokens_per_second: float
    predicted: float  # the speed-up of this length by the recording and the steps

    @property
    def speedup(self) -> float:
        """The speed-up of the fixed length over the target alone."""
        return self.tokens_per_second / self.alone_tokens_per_second


@dataclass(frozen=True)
class Option:
    """One way to decode, and the speed-up over the target alone that is predicted for it."""

    name: str
    speedup: Interval
    # Speed-up over that of the best fixed length, a ratio, on the same resampled prompts
    gain: Interval
    value: str = ""  # what was chosen for it, such as a length
    is_bound: bool = False  # whether no decoder can reach it
    width: int | None = None  # the width of its head


Counted = Sequence[tuple[Candidate, Counts]]  # a rule with its counts, for each half of the prompts


def predict(
    halves: Sequence[RecordedSet], table: CostTable, heads: Mapping[int, float], greedy: bool
) -> list[Option]:
    """Return every option at the measured costs, the target alone first.

    What one half of the prompts chooses is counted on the other, both ways. `heads` are the seconds
    that heads add to a draft step, by width.
    """
    resamples = resample_counts(groups_of_halves(halves))
    counted = _counted(halves, table)
    speeds = {}
    for name, of_halves in counted.items():
        speeds[name] = speed_of(of_halves, resamples, table)
    fixed = speeds[FIXED]
    options = [Option(PLAIN, Interval(1.0, 1.0, 1.0), interval(1 / fixed))]
    for name, speed in speeds.items():
        rules = [rule for rule, _ in counted[name]]
        value = ""
        if name != ORACLE_BOUND.family:
            value = " or ".join(dict.fromkeys(rule.name for rule in rules))
        title = name.replace("_", " ")
        gain = interval(speed / fixed)
        options.append(Option(title, interval(speed), gain, value, is_bound=rules[0].bound))
    # A head's rule takes about as many steps for each emitted token as the ceiling's.
    drafted = sum(counts.drafted.sum() for _, counts in counted[CEILING])
    emitted = sum(counts.tokens.sum() for _, counts in counted[CEILING])
    for width, step_seconds in heads.items():
        slowed = step_seconds * drafted / emitted / table.costs[MEASURED].alone_seconds
        options.append(_head_option(width, fixed, speeds[CEILING], slowed, HEAD_SHARES[greedy]))
    return options


def groups_of_halves(halves: Sequence[RecordedSet]) -> list[Hashable]:
    """Return the group of each prompt of both halves."""
    return list(chain.from_iterable(half.groups for half in halves))


def speed_of(counted: Counted, resamples: np.ndarray, table: CostTable) -> np.ndarray:
    """Return the speed-up (R,) over the target alone at the measured costs, under each row of
    `resamples` (R, P) of the prompts of both halves.
    """
    tokens = np.concatenate([counts.tokens for _, counts in counted])
    seconds = list[np.ndarray]()
    for rule, counts in counted:
        costs = table.of(rule, MEASURED)
        seconds.append(costs.seconds(counts.drafted, counts.rounds, counts.whole))
    alone = table.costs[MEASURED].alone_seconds
    return (resamples @ tokens) / (resamples @ np.concatenate(seconds)) * alone


def _counted(
    halves: Sequence[RecordedSet], table: CostTable
) -> dict[str, list[tuple[Candidate, Counts]]]:
    """Return by way to decode what each half of the prompts chose, with its counts on the other."""
    counted = dict[str, list[tuple[Candidate, Counts]]]()
    first, second = (half.recording for half in halves)
    for recording, other in ((first, second), (second, first)):
        rules = [*candidates(RULES, {}, Tuning(other, table)), ORACLE_BOUND]
        best = best_rules(other, rules, table)
        for rule, counts in zip(best.values(), counts_of(recording, [*best.values()]), strict=True):
            counted.setdefault(rule.family, []).append((rule, counts))
        better = best_rules(better_draft(other, MORE_OVERLAP), FIXED_LENGTHS, table)[FIXED]
        (counts,) = counts_of(better_draft(recording, MORE_OVERLAP), [better])
        counted.setdefault(BETTER, []).append((better, counts))
    return counted


def best_rules(
    recording: Recording, rules: Sequence[Candidate], table: CostTable
) -> dict[str, Candidate]:
    """Return the fastest rule of each family on a recording at the measured costs."""
    dev = RecordedSet(
        "", "dev", recording, range(recording.num_prompts), counts_of(recording, rules)
    )
    best = chosen(rules, table, dev, []).best[MEASURED]
    return {family: rules[number] for family, number in best.items()}


def _head_option(
    width: int, fixed: np.ndarray, ceiling: np.ndarray, slowed: float, shares: Sequence[float]
) -> Option:
    """Return a head at the shares of the gap that heads have closed elsewhere, `slowed` by its cost
    for each emitted token.
    """

    def at(share: float) -> np.ndarray:
        return 1 / (1 / (fixed + share * (ceiling - fixed)) + slowed)

    least, typical, most = map(at, shares)
    # In resamples whose ceiling is the slower one, the largest share is the least.
    low = np.minimum(least, most)
    high = np.maximum(least, most)
    gain = typical / fixed
    return Option(
        head_name(width),
        Interval(float(typical[0]), interval(low).low, interval(high).high),
        Interval(float(gain[0]), interval(low / fixed).low, interval(high / fixed).high),
        width=width,
    )


@dataclass(frozen=True)
class Recommendation:
    """The recommended way to decode, why, and the next command."""

    choice: str
    text: str
    command: str


CommandLine = Callable[..., str]  # it takes a verb and its words


def recommended(options: Sequence[Option], command_line: CommandLine) -> Recommendation:
    """Return the simplest way to decode that no other one beats by what its trouble is worth.

    `command_line` writes the next command, with the pair.
    """
    known = {option.name: option for option in options}
    heads = [option for option in options if option.width is not None]
    ladder = [(known[FIXED_NAME], NOTICEABLE), (known[LOGISTIC], WORTH_A_RULE)]
    if heads:
        ladder.append((max(heads, key=lambda option: option.speedup.value), WORTH_TRAINING))
    chosen = known[PLAIN]
    for option, least in ladder:
        if option.speedup.value > chosen.speedup.value * (1 + least):
            chosen = option
    speed = f"{times(chosen.speedup)} the speed of the target alone"
    over = f"{change(chosen.gain)} over the best fixed length"
    if chosen.name == PLAIN:
        text = "Do not speculate with this draft: nothing is clearly faster than the target alone"
        words = ["probe", "model.draft=<another draft>"]
    elif chosen.name == FIXED_NAME:
        text = f"Draft a fixed number of tokens ({chosen.value}): {speed}"
        words = ["evaluate", "head=null"]
    elif chosen.name == LOGISTIC:
        text = f"Stop by a logistic ({chosen.value}): {speed}, {over}"
        words = ["evaluate", "head=null", "stopping=[fixed_length,logistic]"]
    else:
        text = f"Train a head ({chosen.width} wide): {speed}, {over}"
        words = ["train", f"head.width={chosen.width}"]
    better = known[BETTER]
    if better.gain.value > 1 + WORTH_DISTILLING and better.speedup.value > chosen.speedup.value:
        text += (
            f". A draft with {MORE_OVERLAP:.0%} more overlap would bring {times(better.speedup)}"
            " by itself: distil it first"
        )
        words = ["distill"]
    return Recommendation(chosen.name, f"{text}.", command_line(*words))


def doubts_of(live: LiveCheck) -> Iterator[str]:
    """Yield why predictions are unreliable, if they are."""
    if not 1 / LARGEST_ERROR < live.predicted / live.speedup < LARGEST_ERROR:
        yield (
            f"Drafts of {live.length} tokens are predicted to be {live.predicted:.2f} times as fast"
            f" as the target alone, but were {live.speedup:.2f} times as fast when decoded"
            f" ({live.num_prompts} prompts); probe again on a quiet machine."
        )
