"""Evaluations of simulated prompts, where the true speed of every setting is known.

A population of responses is replayed once with every rule, as an evaluation replays its recordings.
Each evaluation samples dev and final prompts from it with replacement, one by one or whole files,
so that the population's totals are the ground truth. What a head's step costs decides what the head
gains. `python -m tests.simulated_evaluations` says how often conclusions are right.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch

from specheads import AcceptanceHead, HeadConfig
from specheads.decoding.records import DecodeStats
from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.decoding.step_times import FIRST, IN_A_ROW, PLAIN, TARGET, VERIFIED, ends_of
from specheads.decoding.stopping import (
    Confidence,
    DraftProduct,
    FixedLength,
    HeadThreshold,
    MaxProbability,
)
from specheads.decoding.verification import TokenVerification
from specheads.evaluation import decode
from specheads.evaluation.candidates import (
    FIXED,
    TARGET_ALONE,
    Candidate,
    CostTable,
    RuleChoice,
    candidates,
)
from specheads.evaluation.conclusions import verdict_of
from specheads.evaluation.prompt_sets import PromptSet
from specheads.evaluation.replayed_sets import Outcome, RecordedSet, basis_of
from specheads.evaluation.report import MEASURED, DataSet, Kind, Report
from specheads.evaluation.rows import _winners, live_rows
from specheads.evaluation.sweep import Measured, doubts_of, sweep_settings
from specheads.prompts.prompt import Prompt
from specheads.replay.cost import CostFit
from specheads.replay.head_scores import head_fingerprint
from specheads.replay.intervals import Interval, resample_counts
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, Replayed, replay

RATIO = "10"
MAX_TOKENS = 14
STEP, PASS = (
    0.001,
    0.01,
)  # seconds of a draft step and of the target's forward pass where the clock decides
LENGTHS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 14]
THRESHOLDS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def recording(
    num_files: int, size: int, errors: Mapping[str, float], between_files: float, seed: int = 0
) -> Recording:
    """Return `size` responses of 20 to 99 tokens of each file, one file after another.

    Args:
        errors: by feature the standard deviation of its error, as a logit of the acceptance
            probability.
        between_files: the standard deviation of the logits' means between files.
    """
    rng = np.random.default_rng(seed)
    count = num_files * size
    lengths = rng.integers(20, 100, size=count)
    first = np.concatenate([[0], lengths.cumsum()[:-1]])
    total = int(lengths.sum())
    means = (
        1.5
        + np.repeat(between_files * rng.standard_normal(num_files), size)
        + 0.5 * rng.standard_normal(count)
    )
    logit = np.repeat(means, lengths) + 4 * rng.standard_normal(total)
    accepted = rng.random(total) < 1 / (1 + np.exp(-logit))
    left = np.repeat(first + lengths, lengths) - np.arange(
        total
    )  # tokens to the end, this one among them
    branch_length = np.where(accepted, 0, np.minimum(left - 1, MAX_TOKENS))
    ends = branch_length.cumsum()
    branches = np.repeat(means, np.add.reduceat(branch_length, first)) + 4 * rng.standard_normal(
        ends[-1]
    )
    rejected = branch_length > 0
    branches[(ends - branch_length)[rejected]] = logit[rejected]
    known = np.concatenate([logit, branches])
    values = {
        name: known + error * rng.standard_normal(len(known)) for name, error in errors.items()
    }
    values |= {name: 1 / (1 + np.exp(-values[name])) for name in ("draft_prob", "max_prob")}
    return Recording(
        prompts=[[0]] * count,
        first=torch.from_numpy(first),
        lengths=torch.from_numpy(lengths),
        limits=torch.from_numpy(lengths),
        finished=torch.zeros(count, dtype=torch.bool),
        accepted=torch.from_numpy(accepted)[None],
        branch_first=torch.from_numpy(total + ends - branch_length)[None],
        branch_length=torch.from_numpy(branch_length)[None],
        tokens=torch.zeros(len(known), dtype=torch.long),
        features={name: torch.from_numpy(each.astype(np.float32)) for name, each in values.items()},
        max_tokens=MAX_TOKENS,
    )


class Population:
    """Files of `size` prompts each, and every rule replayed on all of them.

    The heads' errors are independent of each other. `headless` rules know so little that they gain
    nothing.
    """

    def __init__(
        self,
        num_files: int,
        size: int = 1,
        heads: int = 1,
        error: float = 0.0,
        between_files: float = 0.0,
        headless: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.num_files = num_files
        self.size = size
        self.heads = {f"head {number}": AcceptanceHead(HeadConfig(8, 0)) for number in range(heads)}
        for head in self.heads.values():
            torch.nn.init.normal_(
                next(iter(head.parameters()))
            )  # by its weights a recording knows it
        errors = {head_fingerprint(head): error for head in self.heads.values()} | {
            "draft_prob": 6.0,
            "max_prob": 6.0,
        }
        self.recording = recording(num_files, size, errors, between_files)
        rules = {
            FIXED: RuleChoice(FixedLength, {"num_tokens": LENGTHS}),
            "head_threshold": RuleChoice(
                HeadThreshold,
                {"threshold": THRESHOLDS, "min_tokens": None, "max_tokens": MAX_TOKENS},
            ),
        }
        others = (
            {
                "draft_product": DraftProduct,
                "confidence": Confidence,
                "max_probability": MaxProbability,
            }
            if headless
            else {}
        )
        rules |= {
            name: RuleChoice(cls, {"threshold": THRESHOLDS, "max_tokens": MAX_TOKENS})
            for name, cls in others.items()
        }
        self.rules = candidates(rules, self.heads, None)
        self.replayed = replay(
            self.recording, [rule.rule for rule in self.rules if rule.rule is not None]
        )
        self.counts = [rounds.per_prompt(self.recording.num_prompts) for rounds in self.replayed]

    def sample(
        self, rng: np.random.Generator, count: int, per_file: int
    ) -> tuple[np.ndarray, list[int]]:
        """Return `count` prompts, `per_file` of each of some files, and the file of each as groups
        of prompts are numbered.
        """
        files = rng.integers(self.num_files, size=count // per_file)
        members = rng.random((len(files), self.size)).argsort(axis=1)[:, :per_file]
        return (files[:, None] * self.size + members).ravel(), (
            np.arange(count) // per_file
        ).tolist()

    @cached_property
    def rounds(self) -> dict[str, list[np.ndarray]]:
        """By setting the rounds of each prompt (n, 2): their tokens, and how many were drafted."""
        ends = np.arange(1, self.recording.num_prompts)

        def by_prompt(each: Replayed) -> list[np.ndarray]:
            order = np.lexsort((each.start, each.prompt))
            return np.split(
                np.stack([each.tokens, each.drafted], axis=1)[order],
                np.searchsorted(each.prompt[order], ends),
            )

        alone = [np.tile([1, 0], (length, 1)) for length in self.recording.lengths.tolist()]
        named = zip(self.rules, self.replayed, strict=True)
        return {TARGET_ALONE.name: alone} | {rule.name: by_prompt(each) for rule, each in named}


@dataclass(frozen=True)
class Clock:
    """How a machine that others use stretches the seconds of rounds, none of which its counters
    show.

    Its speed drifts by a tenth up and down; for two seconds in twenty it is slower by `burst`,
    whatever is decoded then; a round in 200 waits, a few times its own seconds or up to 20 times.
    """

    burst: float = 1.6

    def seconds(self, rng: np.random.Generator, quiet: np.ndarray) -> np.ndarray:
        """Return the seconds of rounds (n,), one after another, that take `quiet` seconds on a
        quiet machine.
        """
        now = quiet.cumsum()
        count = len(quiet)
        factor = np.exp(
            0.05 * rng.standard_normal(count)
            + 0.1 * np.sin(2 * np.pi * (now / now[-1] * rng.uniform(0.5, 2) + rng.random()))
        )
        factor *= 1 + (rng.random(count) < 0.005) * np.minimum(2 * rng.pareto(1.5, count), 20)
        starts = rng.random(rng.poisson(now[-1] / 20)) * now[-1]
        for start, end in zip(starts, starts + rng.exponential(2, len(starts)), strict=True):
            first, last = np.searchsorted(now, (start, end))
            factor[first:last] *= self.burst
        return quiet * factor


class Simulation:
    """Evaluations of samples of a population, in which the best threshold of each head gains `gain`
    over the best fixed length.

    Args:
        per_file: how many dev and how many final prompts are of one file.
    """

    def __init__(
        self,
        of: Population,
        gain: float,
        num_prompts: tuple[int, int] = (100, 1_000),
        per_file: tuple[int, int] = (1, 1),
    ):
        self.of = of
        self.num_prompts = num_prompts
        self.per_file = per_file
        self.table = self._costs(1 + gain)
        self.truth = self._speeds(self.table)
        self.fixed = self._best(self.truth, [rule for rule in of.rules if rule.family == FIXED])
        self.headless = self._best(self.truth, [rule for rule in of.rules if rule.head is None])

    def _speeds(self, table: CostTable) -> dict[str, float]:
        once = np.ones((1, self.of.recording.num_prompts))
        named = zip(self.of.rules, self.of.counts, strict=True)
        return {TARGET_ALONE.name: 1.0} | {
            rule.name: float(table.speedup(each, once, rule, RATIO)[0]) for rule, each in named
        }

    def _best(self, speeds: Mapping[str, float], rules: Iterable[Candidate]) -> float:
        return max(speeds[rule.name] for rule in rules)

    def _costs(self, factor: float) -> CostTable:
        """Return costs at which no head gains more than it should, by bisection."""
        free = CostTable({RATIO: StepCosts.at_ratio(10)})
        heads = list(self.of.heads)
        goal = factor * self._best(
            self._speeds(free), [rule for rule in self.of.rules if rule.family == FIXED]
        )
        low = np.zeros(len(heads))
        high = np.full(len(heads), 2.0)
        for _ in range(30):
            middle = (low + high) / 2
            speeds = self._speeds(
                replace(free, head_shares=dict(zip(heads, middle.tolist(), strict=True)))
            )
            gains = [
                self._best(speeds, [rule for rule in self.of.rules if rule.head == head]) > goal
                for head in heads
            ]
            low = np.where(gains, middle, low)
            high = np.where(gains, high, middle)
        assert (low > 0).all(), f"these heads cannot gain {factor - 1:.0%}"
        return replace(free, head_shares=dict(zip(heads, high.tolist(), strict=True)))

    def _sampled(self, rng: np.random.Generator) -> list[tuple[RecordedSet, np.ndarray]]:
        sets = []
        for role, count, per_file in zip(
            ("dev", "test"), self.num_prompts, self.per_file, strict=True
        ):
            prompts, groups = self.of.sample(rng, count, per_file)
            counts = [
                Counts(*(column[prompts] for column in vars(each).values()))
                for each in self.of.counts
            ]
            recorded: Any = SimpleNamespace(num_prompts=count)
            sets.append((RecordedSet(role, role, recorded, groups, counts), prompts))
        return sets

    def replay(self, rng: np.random.Generator) -> Report:
        """Return the report of an evaluation that replays everything and decodes nothing."""
        outcome = Outcome(
            self.of.rules, self.table, [each for each, _ in self._sampled(rng)]
        ).chosen()
        return self._report(outcome)

    def decode(self, rng: np.random.Generator, clock: Clock) -> Report:
        """Return the report of an evaluation that decodes all final prompts.

        Its verdict rests on the clock, or with doubts on replay at the costs of steps that are
        timed by themselves.
        """
        (dev, dev_prompts), (final, prompts) = sampled = self._sampled(rng)
        shares = self.table.head_shares
        fit = CostFit(
            StepCosts(STEP, PASS),
            {rule.kind: RuleCosts(STEP * shares.get(rule.head or "", 0)) for rule in self.of.rules},
        )
        table = replace(self.table, costs={MEASURED: fit.costs}, fit=fit, alone=1 / PASS)
        outcome = Outcome(self.of.rules, table, [each for each, _ in sampled]).chosen()
        measured = self._sweep(rng, clock, sweep_settings(decode.best_of_kinds(outcome)), prompts)
        outcome = replace(
            outcome, measured=measured, doubts=list(doubts_of(measured, fit, final.groups))
        )
        places = enumerate(zip(dev_prompts, dev.groups, strict=True))
        ids = [
            (Prompt(str(n), "dev", "", group=str(group)), [int(prompt)])
            for n, (prompt, group) in places
        ]
        setup: Any = SimpleNamespace(
            pair=None,
            window=64,
            head_sizes=shares,
            counted_costs=lambda: self.table,
            prompts=SimpleNamespace(dev=PromptSet("dev", "dev", ids)),
            settings=SimpleNamespace(
                num_live_prompts=len(prompts), verification=TokenVerification()
            ),
        )
        machine = patch.multiple(
            decode,
            sweep=lambda _, name, tried, some: self._sweep(
                rng, clock, tried, [number for _, (number,) in some]
            ),
            step_time_ends=lambda decoder, rules, *until: ends_of(
                self._steps(rng, clock, rules), rules
            ),
            _decoder=lambda setup: None,
            _tuned_again=lambda setup, outcome, tuning: outcome,
        )
        with machine:
            if outcome.doubts:
                outcome = decode.settle_by_steps(setup, outcome, cast(Any, None))
            else:
                outcome = replace(outcome, tried=decode.tried_on_dev(setup, outcome))
        return self._report(outcome)

    def _report(self, outcome: Outcome) -> Report:
        """Return the report of an outcome, of all that its verdict reads."""
        final = outcome.sets[1]
        table = outcome.cost_table
        winners = []
        for ratio, chosen in outcome.best.items() if outcome.doubts or not outcome.measured else ():
            counted = {number: final.counts[number] for number in chosen.values()}
            speeds: Any = {
                n: table.speedup(each, final.resamples, self.of.rules[n], ratio)
                for n, each in counted.items()
            }
            winners += _winners(final, outcome, ratio, speeds)
        data_sets = (
            [DataSet("simulated", "test", self.num_prompts[1], 1, 1, [], winners)]
            if winners
            else []
        )
        live = live_rows(outcome, True, final.groups) if outcome.measured else []
        report = Report({}, table.fit, outcome.doubts, live, data_sets, basis=basis_of(outcome))
        return replace(report, verdict=verdict_of(report, outcome.uses))

    def _steps(
        self, rng: np.random.Generator, clock: Clock, rules: Iterable[str]
    ) -> dict[str, np.ndarray]:
        """Return the seconds of steps by name, of each in 300 turns."""
        heads = {rule.step_kind: rule.head for rule in self.of.rules}
        drafts = {PLAIN: STEP} | {
            name: STEP * (1 + self.table.head_shares.get(heads[name] or "", 0.0)) for name in rules
        }
        others = {FIRST: STEP, TARGET: PASS} | {f"{count} verified": PASS for count in VERIFIED}
        quiet = np.array([IN_A_ROW * each for each in drafts.values()] + [*others.values()])
        seconds = clock.seconds(rng, np.tile(quiet, 300)).reshape(300, -1)
        seconds[:, : len(drafts)] /= IN_A_ROW
        return dict(zip([*drafts, *others], seconds.T, strict=True))

    def _sweep(
        self,
        rng: np.random.Generator,
        clock: Clock,
        settings: Sequence[Candidate],
        prompts: Sequence[int],
    ) -> list[Measured]:
        """Return what decoding prompts with every setting in turns measures.

        Only of the target alone, and of every fourth prompt, are there single rounds, which tell
        how busy the machine was.
        """
        turns = [
            ((turn + n) % len(settings), n)
            for n in range(len(prompts))
            for turn in range(len(settings))
        ]
        rounds = [self.of.rounds[settings[which].name][prompts[n]] for which, n in turns]
        steps = STEP * (
            1 + np.array([self.table.head_shares.get(each.head or "", 0.0) for each in settings])
        )
        lengths = [len(each) for each in rounds]
        quiet = (
            np.repeat(steps[[which for which, _ in turns]], lengths) * np.concatenate(rounds)[:, 1]
            + PASS
        )
        times = np.split(clock.seconds(rng, quiet), np.cumsum(lengths)[:-1])
        measured = [Measured(setting, load=[(0.0, 1.0)]) for setting in settings]
        for (which, n), made, taken in zip(turns, rounds, times, strict=True):
            tokens, drafted = made.sum(axis=0).tolist()
            stats = DecodeStats(tokens, drafted, 0, 0, len(made), drafted, float(taken.sum()), 0.0)
            measured[which].stats.append(stats)
            some, each = (
                (taken.tolist(), 1)
                if settings[which] == TARGET_ALONE and n % 4 == 0
                else ([stats.seconds], tokens)
            )
            measured[which].rounds.append([[each, 0, 0, 0.0, seconds] for seconds in some])
        return measured


@dataclass
class Tally:
    """How often evaluations said what."""

    runs: int = 0
    doubted: int = 0  # did not trust the clock
    heads: int = 0  # said to use a head
    false_wins: int = (
        0  # used a rule with an interval above the best fixed length, and it is no faster
    )
    found: int = 0  # used a head with an interval above the best fixed length, and it is faster
    # The interval of the head's gain over the fixed length that dev prompts chose has the true gain
    covered: int = 0
    # The setting to use is slower than the best one without a head, by more than half its interval
    worse: int = 0
    rows: int = (
        0  # the interval of the best head's row is above the best fixed length, and it is no faster
    )

    def add(self, simulation: Simulation, report: Report) -> None:
        assert report.verdict
        answer = report.verdict.answer
        truth = simulation.truth
        used, head, fixed = (answer.choices[kind] for kind in (answer.use, Kind.HEAD, Kind.FIXED))
        wins = (
            answer.use not in (Kind.FIXED, Kind.ALONE)
            and used.gain is not None
            and used.gain.low > 1
        )
        gain = head.gain or Interval(0, 0, 0)
        self.runs += 1
        self.doubted += bool(report.doubts)
        self.heads += answer.use == Kind.HEAD
        self.false_wins += wins and truth[used.name] <= simulation.fixed
        self.found += wins and answer.use == Kind.HEAD and truth[used.name] > simulation.fixed
        self.covered += gain.low <= truth[head.name] / truth[fixed.name] <= gain.high
        self.worse += (
            simulation.headless - truth[used.name] > (used.speedup.high - used.speedup.low) / 2
        )
        self.rows += gain.low > 1 and truth[head.name] <= simulation.fixed

    def share(self, name: str) -> float:
        return float(getattr(self, name)) / self.runs

    def __str__(self) -> str:
        shares = {
            name: self.share(name)
            for name in ("heads", "false_wins", "found", "covered", "worse", "rows")
        }
        return f"{self.runs} runs, {self.doubted} in doubt, " + ", ".join(
            f"{name} {each:.1%}" for name, each in shares.items()
        )


def concluded(simulation: Simulation, runs: int, clock: Clock | None = None) -> Tally:
    """Return what so many evaluations concluded, by replay or by a clock."""
    rng = np.random.default_rng(1)
    tally = Tally()
    kept = lru_cache(resample_counts)  # they are the same for any prompts of so many groups
    with ExitStack() as stack:
        for module in ("decode", "replayed_sets", "rows"):
            name = f"specheads.evaluation.{module}.resample_counts"
            stack.enter_context(patch(name, lambda groups: kept(tuple(groups))))
        for _ in range(runs):
            tally.add(
                simulation,
                simulation.replay(rng) if clock is None else simulation.decode(rng, clock),
            )
    return tally


@lru_cache
def _populations() -> tuple[Population, Population, Population]:
    """Return prompts that are alike, the same with eight heads and no other rules, and prompts of
    75 files that differ.
    """
    return (
        Population(1_500),
        Population(800, heads=8, error=1.0, headless=False),
        Population(75, size=20, between_files=1.0),
    )


DECODED = {"num_prompts": (200, 400)}
IN_FILES = {"per_file": (4, 20)}
CASES: dict[str, Callable[[int], Tally]] = {
    "no gain": lambda runs: concluded(Simulation(_populations()[0], 0.0), runs),
    "no gain of eight heads": lambda runs: concluded(Simulation(_populations()[1], 0.0), runs),
    "gain of 2 %": lambda runs: concluded(Simulation(_populations()[0], 0.02), runs),
    "gain of 5 %": lambda runs: concluded(Simulation(_populations()[0], 0.05), runs),
    "gain of 10 %": lambda runs: concluded(Simulation(_populations()[0], 0.10), runs),
    "no gain, 50 files": lambda runs: concluded(
        Simulation(_populations()[2], 0.0, **IN_FILES), runs
    ),
    "gain of 5 %, 50 files": lambda runs: concluded(
        Simulation(_populations()[2], 0.05, **IN_FILES), runs
    ),
    "no gain, by a busy clock, 32 prompts": lambda runs: concluded(
        Simulation(_populations()[0], 0.0, num_prompts=(100, 32)), runs, Clock()
    ),
    "no gain, by a busy clock": lambda runs: concluded(
        Simulation(_populations()[0], 0.0, **DECODED), runs, Clock()
    ),
    "no gain, too busy for the clock": lambda runs: concluded(
        Simulation(_populations()[0], 0.0, num_prompts=(100, 100)), runs, Clock(burst=8)
    ),
    "gain of 5 %, too busy for the clock": lambda runs: concluded(
        Simulation(_populations()[0], 0.05, num_prompts=(100, 100)), runs, Clock(burst=8)
    ),
    "gain of 5 %, by a busy clock": lambda runs: concluded(
        Simulation(_populations()[0], 0.05, **DECODED), runs, Clock()
    ),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, of in CASES.items():
        print(f"{name}: {of(400)}", flush=True)
