"""What each way to decode would be worth, from recorded prompts and measured steps; every choice is made on other prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specheads.decoding.step_times import StepTimes
from specheads.decoding.stopping import MAX_TOKENS, FixedLength, Logistic
from specheads.evaluation.candidate import CEILING, FIXED, ORACLE, Candidate, RuleChoice
from specheads.evaluation.candidates import candidates
from specheads.evaluation.intervals import Groups, Interval, interval, resample_counts
from specheads.evaluation.probe.agreement import Agreement, better_draft, block_counts, fixed_counts
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.tuning import Tuning
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, oracle, replay

PLAIN, FIXED_NAME, LOGISTIC = "the target alone", "fixed length", "logistic"
BLOCK, BETTER, HEAD = "block verification", "a better draft", "head of width "  # the last is followed by the width
HERE = "here"  # the name of the measured costs
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(2, 20))
RULES = {
    FIXED: RuleChoice(FixedLength, {"num_tokens": list(LENGTHS)}),
    LOGISTIC: RuleChoice(
        Logistic,
        {"threshold": list(THRESHOLDS), "weights": {"logit_max_prob": None, "bias": None}, "max_tokens": MAX_TOKENS},
    ),
}
# Of the way from the best fixed length to the informed ceiling, what trained heads closed on mini at ratios 5 to 20, with less
# than 1 % of a draft step for their cost: the least and the most on two sets of prompts, and a value between them
# (docs/measurements/rules.md, rules_sampled and rules_greedy). A probe of mini itself is therefore no test of them.
HEAD_SHARES = {False: (0.29, 0.32, 0.37), True: (0.38, 0.43, 0.52)}  # by whether decoding is greedy
MORE_OVERLAP = 0.1  # half of what distillation added to the overlap of nano's and mini's drafts


@dataclass(frozen=True)
class Half:
    """The recording of one half of the prompts, with what both models say along the responses."""

    recording: Recording
    agreed: Agreement
    groups: Sequence[str]


@dataclass(frozen=True)
class Overheads:
    """The seconds that decoding takes besides its steps: of a round with a draft, and of a token of the target alone."""

    round_seconds: float = 0.0
    alone_seconds: float = 0.0


@dataclass(frozen=True)
class Option:
    """One way to decode, and the speed-up over the target alone that is predicted for it."""

    name: str
    speedup: Interval
    gain: Interval  # speed-up over that of the best fixed length, a ratio, on the same resampled prompts
    value: str = ""  # what was chosen for it, such as a length
    is_bound: bool = False  # whether no decoder can reach it
    width: int | None = None  # of its head


@dataclass
class Counted:
    """The counts of one way to decode on each half of the prompts, and what was chosen for it."""

    counts: list[Counts] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    def add(self, counts: Counts, chosen: str) -> None:
        """Add the counts of the next half."""
        self.counts.append(counts)
        self.chosen.append(chosen)


def predict(halves: Sequence[Half], times: StepTimes, greedy: bool, overheads: Overheads | None = None) -> list[Option]:
    """Return every option, the target alone first.

    Lengths and thresholds are chosen on one half of the prompts and counted on the other, both ways.
    """
    return Prediction(halves, times, greedy, overheads or Overheads()).options()


def fixed_of(options: Sequence[Option]) -> Option:
    """Return the best fixed length of some options."""
    return next(option for option in options if option.name == FIXED_NAME)


def best_length(halves: Sequence[Half], times: StepTimes, greedy: bool) -> int:
    """Return the fixed length that is the fastest on all prompts."""
    prediction = Prediction(halves, times, greedy, Overheads())
    counts = zip(*(fixed_counts(half.recording, LENGTHS) for half in halves), strict=True)
    speeds = [prediction.speeds(of_halves, 0.0)[0] for of_halves in counts]
    return LENGTHS[int(np.argmax(speeds))]


class Prediction:
    """The counts of every option on all prompts, each half at what the other half chose."""

    def __init__(self, halves: Sequence[Half], times: StepTimes, greedy: bool, overheads: Overheads) -> None:
        self.costs = replace(times.costs, round_seconds=overheads.round_seconds)
        self.halves, self.times, self.greedy = halves, times, greedy
        self.table, self.alone = CostTable({HERE: self.costs}), self.costs.target_seconds + overheads.alone_seconds
        groups: Groups = [group for half in halves for group in half.groups]
        self.resamples = resample_counts(groups)

    def options(self) -> list[Option]:
        """Return every option."""
        counted = self._rules_counted() | self._lengths_counted()
        counted[ORACLE] = Counted([oracle(half.recording).per_prompt(half.recording.num_prompts) for half in self.halves])
        speeds = {name: self.speeds(each.counts, self._more(name)) for name, each in counted.items()}
        fixed = speeds[FIXED]
        options = [Option(PLAIN, Interval(1.0, 1.0, 1.0), interval(1 / fixed))]
        for name, samples in speeds.items():
            chosen = " or ".join(dict.fromkeys(counted[name].chosen))
            is_bound = name in (CEILING, ORACLE)
            options.append(Option(name.replace("_", " "), interval(samples), interval(samples / fixed), chosen, is_bound))
        return options + self._heads(counted[CEILING].counts, speeds)

    def _rules_counted(self) -> "dict[str, Counted]":
        """Return the counts of every rule, on each half with the value that was the best on the other."""
        counted: dict[str, Counted] = {}
        for number, half in enumerate(self.halves):
            for family, candidate in self._best(self.halves[1 - number]).items():
                rounds = replay(half.recording, [candidate.rule])[0]
                counted.setdefault(family, Counted()).add(rounds.per_prompt(half.recording.num_prompts), candidate.name)
        return counted

    def _lengths_counted(self) -> "dict[str, Counted]":
        """Return the counts of fixed lengths under block verification, and of those of a better draft."""
        counted: dict[str, Counted] = {}
        ways: dict[str, Callable[[Half], Sequence[Counts]]] = {
            BLOCK: lambda half: block_counts(half.recording, half.agreed, LENGTHS),
            BETTER: lambda half: fixed_counts(better_draft(half.recording, MORE_OVERLAP), LENGTHS),
        }
        for name in (BETTER,) if self.greedy else (BLOCK, BETTER):  # block verification is token verification then
            lengths = [dict(zip(LENGTHS, ways[name](half), strict=True)) for half in self.halves]
            for number, counts in enumerate(lengths):
                other = lengths[1 - number]
                best = max(LENGTHS, key=lambda length, other=other: self._total(other[length]))  # type: ignore[misc]
                counted.setdefault(name, Counted()).add(counts[best], f"fixed K={best}")
        return counted

    def _more(self, family: str) -> float:
        """Return the seconds that a family of rules adds to a draft step."""
        return self.times.rules[LOGISTIC].step_seconds if family == LOGISTIC else 0.0

    def _best(self, half: Half) -> dict[str, Candidate]:
        """Return the fastest candidate of each family on one half, to which open parameters are fitted."""
        recording = half.recording
        rules = candidates(RULES, {}, Tuning(recording, self.table))
        best: dict[str, tuple[float, Candidate]] = {}
        for candidate, rounds in zip(rules, replay(recording, [rule.rule for rule in rules]), strict=True):
            speed = self._total(rounds.per_prompt(recording.num_prompts), self._more(candidate.family))
            if candidate.family not in best or speed > best[candidate.family][0]:
                best[candidate.family] = (speed, candidate)
        return {family: candidate for family, (_, candidate) in best.items()}

    def _heads(self, of_ceiling: Sequence[Counts], speeds: Mapping[str, np.ndarray]) -> list[Option]:
        """Return heads of every width that was timed, at the share of the gap that heads have closed elsewhere."""
        fixed, ceiling = speeds[FIXED], speeds[CEILING]
        # A head's rule drafts about as much per emitted token as the ceiling's.
        drafted = sum(each.drafted.sum() for each in of_ceiling) / sum(each.tokens.sum() for each in of_ceiling)
        options = []
        for name, rule in self.times.rules.items():
            if name == LOGISTIC:
                continue
            seconds = rule.step_seconds
            least, typical, most = (
                self._slowed(fixed + share * (ceiling - fixed), seconds * drafted) for share in HEAD_SHARES[self.greedy]
            )
            speedup, gain = (
                Interval(float(each[1][0]), interval(each[0]).low, interval(each[2]).high)
                for each in ((least, typical, most), (least / fixed, typical / fixed, most / fixed))
            )
            options.append(Option(name, speedup, gain, width=int(name.removeprefix(HEAD))))
        return options

    def _slowed(self, speed: np.ndarray, seconds: float) -> np.ndarray:
        """Return speed-ups with so many seconds more for each emitted token."""
        return 1 / (1 / speed + seconds / self.alone)

    def _total(self, counts: Counts, more: float = 0.0) -> float:
        seconds = self.costs.seconds(counts.drafted, counts.rounds).sum() + more * counts.drafted.sum()
        return float(counts.tokens.sum() / seconds * self.alone)

    def speeds(self, counts: Sequence[Counts], more: float) -> np.ndarray:
        """Return the speed-ups (R,) of counts of each half, with so many seconds more in each draft step."""
        seconds = np.concatenate([self.costs.seconds(each.drafted, each.rounds) + more * each.drafted for each in counts])
        tokens = np.concatenate([each.tokens for each in counts])
        return (self.resamples @ tokens) / (self.resamples @ seconds) * self.alone
