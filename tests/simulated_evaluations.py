"""Evaluations of simulated prompts on simulated machines, where the true speed of every setting is
known.

A population of responses is replayed once with every rule, as an evaluation replays its recordings.
Each evaluation samples dev and final prompts from it with replacement, one by one or whole files,
so that the population's totals are the ground truth. What a head's step costs decides what the head
gains. Steps and rounds take the seconds that a machine's noise makes of them.
`python -m tests.simulated_evaluations` says how often conclusions are right.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch

from specheads import AcceptanceHead, HeadConfig
from specheads.decoding.records import DecodeStats
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import (
    FIRST,
    IN_A_ROW,
    PLAIN,
    TARGET,
    VERIFIED,
    Step,
    TimedSteps,
    repeated,
)
from specheads.decoding.stopping import (
    Confidence,
    DraftProduct,
    FixedLength,
    HeadThreshold,
    MaxProbability,
)
from specheads.evaluation.answer import answer_of
from specheads.evaluation.candidates import (
    FIXED,
    TARGET_ALONE,
    Candidate,
    CostTable,
    RuleChoice,
    candidates,
    step_kind,
)
from specheads.evaluation.costs import Overheads, cost_table
from specheads.evaluation.keys import Kind
from specheads.evaluation.replayed_sets import RecordedSet, Results, chosen
from specheads.evaluation.report import DataSet, Report
from specheads.evaluation.rows import data_set, live_rows, winners_of
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.sweep import (
    DecodedRound,
    Measured,
    disagreements_of,
    doubts_of,
    sweep_settings,
)
from specheads.replay.head_scores import head_fingerprint
from specheads.replay.intervals import Interval, interval
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, Replayed, replay

RATIO = "10"
MAX_TOKENS = 14
# Seconds of a draft step and of the target's forward pass, where steps are timed
STEP = 0.0001
PASS = 0.001
LENGTHS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 14]
THRESHOLDS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
NUM_DECODED = 32  # prompts


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
    # Tokens to the end, this one among them
    left = np.repeat(first + lengths, lengths) - np.arange(total)
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
        lengths: Sequence[int] = LENGTHS,
        thresholds: Sequence[float] = THRESHOLDS,
    ) -> None:
        torch.manual_seed(0)
        self.num_files = num_files
        self.size = size
        self.heads = {f"head {number}": AcceptanceHead(HeadConfig(8, 0)) for number in range(heads)}
        for head in self.heads.values():
            # By its weights a recording knows it
            torch.nn.init.normal_(next(iter(head.parameters())))
        errors = {head_fingerprint(head): error for head in self.heads.values()} | {
            "draft_prob": 6.0,
            "max_prob": 6.0,
        }
        self.recording = recording(num_files, size, errors, between_files)
        rules = {
            FIXED: RuleChoice(FixedLength, {"num_tokens": list(lengths)}),
            "head_threshold": RuleChoice(
                HeadThreshold,
                {"threshold": list(thresholds), "min_tokens": None, "max_tokens": MAX_TOKENS},
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
            name: RuleChoice(cls, {"threshold": list(thresholds), "max_tokens": MAX_TOKENS})
            for name, cls in others.items()
        }
        self.choices = rules
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
class Noise:
    """How a machine stretches the seconds of what it runs, none of which its counters show.

    Each step is slower by a few percent at random, and the speed drifts up and down by `drift`. For
    `burst_seconds` at a time, after `calm_seconds`, all is slower by `burst`. A share `waits` of
    the steps waits, a few times its own seconds or up to 20 times. For each second that it runs,
    other processes take a core `preemptions` times, for `pause` seconds on average.
    """

    jitter: float = 0.03
    drift: float = 0.1
    burst: float = 1.6
    burst_seconds: float = 2.0
    calm_seconds: float = 18.0
    waits: float = 0.005
    preemptions: float = 0.0
    pause: float = 0.02


QUIET = Noise(burst=1.0, drift=0.03, waits=0.002)
BUSY = Noise()
# As decoded rounds of nano were next to eight busy processes on two cores: of those of the target
# alone, 0.33 ms without others, 15 % took 20 ms more; of those with four drafted tokens, 2 ms, 75 %
# took 12 ms more.
CROWDED = Noise(preemptions=450)


class Machine:
    """A clock that what runs on a noisy machine moves on."""

    def __init__(self, rng: np.random.Generator, noise: Noise) -> None:
        self.now = 0.0
        self._rng = rng
        self._noise = noise
        self._phase = 2 * np.pi * rng.random()
        self._period = rng.uniform(5, 60)
        self._is_burst = False
        self._changes = rng.exponential(noise.calm_seconds)

    def run(self, quiet: float) -> float:
        """Run what takes `quiet` seconds without noise; return the seconds that it takes here."""
        noise = self._noise
        rng = self._rng
        while self.now > self._changes:
            self._is_burst = not self._is_burst
            mean = noise.burst_seconds if self._is_burst else noise.calm_seconds
            self._changes += rng.exponential(mean)
        drift = noise.drift * np.sin(2 * np.pi * self.now / self._period + self._phase)
        factor = np.exp(drift + noise.jitter * abs(rng.standard_normal()))
        if self._is_burst:
            factor *= noise.burst
        if rng.random() < noise.waits:
            factor *= 1 + min(2 * rng.pareto(1.5), 20)
        seconds = float(quiet * factor)
        for _ in range(rng.poisson(noise.preemptions * seconds)):
            seconds += rng.exponential(noise.pause)
        self.now += seconds
        return seconds


class Simulation:
    """Evaluations of samples of a population, in which the best threshold of each head gains `gain`
    over the best fixed length.

    Args:
        num_prompts: dev prompts, and final ones.
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
        speeds = {TARGET_ALONE.name: 1.0}
        for rule, counts in zip(self.of.rules, self.of.counts, strict=True):
            speeds[rule.name] = table.speedup(counts, once, rule, RATIO).item()
        return speeds

    def _best(self, speeds: Mapping[str, float], rules: Iterable[Candidate]) -> float:
        return max(speeds[rule.name] for rule in rules)

    def _costs(self, factor: float) -> CostTable:
        """Return costs at which no head gains more than it should, by bisection."""
        free = CostTable({RATIO: StepCosts.at_ratio(PASS / STEP)})
        heads = list(self.of.heads)
        fixed = [rule for rule in self.of.rules if rule.family == FIXED]
        goal = factor * self._best(self._speeds(free), fixed)
        low = np.zeros(len(heads))
        high = np.full(len(heads), 2.0)
        for _ in range(30):
            middle = (low + high) / 2
            shares = dict(zip(heads, middle.tolist(), strict=True))
            speeds = self._speeds(replace(free, head_shares=shares))
            gains = []
            for head in heads:
                rules = [rule for rule in self.of.rules if rule.head == head]
                gains.append(self._best(speeds, rules) > goal)
            low = np.where(gains, middle, low)
            high = np.where(gains, high, middle)
        assert (low > 0).all(), f"these heads cannot gain {factor - 1:.0%}"
        return replace(free, head_shares=dict(zip(heads, high.tolist(), strict=True)))

    def _sample(
        self, rng: np.random.Generator, role: str, count: int, per_file: int
    ) -> tuple[RecordedSet, np.ndarray]:
        """Return a set of prompts with the counts of all rules, and their numbers."""
        prompts, groups = self.of.sample(rng, count, per_file)
        counts = [
            Counts(
                each.tokens[prompts],
                each.drafted[prompts],
                each.accepted[prompts],
                each.rounds[prompts],
                each.whole[prompts],
            )
            for each in self.of.counts
        ]
        recording = replace(self.of.recording, prompts=[[0]] * count)
        return RecordedSet(role, role, recording, groups, counts), prompts

    def _samples(self, rng: np.random.Generator) -> tuple[RecordedSet, RecordedSet, np.ndarray]:
        """Return dev prompts, final ones, and the numbers of these."""
        num_dev, num_final = self.num_prompts
        dev_per_file, final_per_file = self.per_file
        dev, _ = self._sample(rng, "dev", num_dev, dev_per_file)
        final, prompts = self._sample(rng, "test", num_final, final_per_file)
        return dev, final, prompts

    def evaluate(self, noise: Noise | None, rng: np.random.Generator) -> Report:
        """Return the report of an evaluation, see `results`."""
        return self.report(self.results(noise, rng))

    def results(self, noise: Noise | None, rng: np.random.Generator) -> Results:
        """Return the results of an evaluation that times steps on a noisy machine, and decodes the
        chosen rules there.

        Without noise, of one that counts costs and decodes nothing.
        """
        dev, final, prompts = self._samples(rng)
        if noise is None:
            return chosen(self.of.rules, self.table, dev, [final])
        machine = Machine(rng, noise)
        table = cost_table(
            CostTable({}, self.table.head_shares),
            self._timed(machine),
            Overheads(),
            self.of.choices,
        )
        results = chosen(self.of.rules, table, dev, [final])
        to_decode = sweep_settings(results.best_of_kinds)
        measured = self._decoded(machine, to_decode, prompts[:NUM_DECODED])
        results = replace(results, measured=measured)
        num_decoded = len(prompts[:NUM_DECODED])
        groups = final.groups[:num_decoded]
        doubts = [*doubts_of(measured, groups)]
        disagreements = [*disagreements_of(measured, results.predicted(num_decoded), groups)]
        return replace(results, doubts=doubts, disagreements=disagreements)

    def report(self, results: Results, rules: bool = False) -> Report:
        """Return the report of results: all that its answer reads, and with `rules` their rows."""
        final = results.reported
        winners = winners_of(final, results, results.main_ratio)
        data = DataSet("simulated", "test", self.num_prompts[1], 1, 1, [], winners)
        if rules:
            data = data_set(final, results)
        steps = results.cost_table.steps
        report = Report(
            {"draft": "my/draft"},
            None if steps is None else steps.estimate,
            results.doubts,
            live_rows(results, True, final.groups[:NUM_DECODED]) if results.measured else [],
            [data],
            ratio=None if steps is None else interval(steps.ratios()),
            disagreements=results.disagreements,
        )
        answer = answer_of(report, results.uses, self.num_prompts[0])
        return replace(report, answer=answer)

    def _timed(self, machine: Machine) -> TimedSteps:
        """Return what a clock says of steps, as an evaluation times them."""
        shares = self.table.head_shares
        quiet = {PLAIN: IN_A_ROW * STEP, FIRST: STEP, TARGET: PASS}
        for count in VERIFIED:
            quiet[f"{count} verified"] = PASS
        kinds = []
        for choice in self.of.choices.values():
            if choice.cls.uses_head:
                for head in self.of.heads:
                    kinds.append(step_kind(choice.cls, head))
                    quiet[kinds[-1]] = IN_A_ROW * STEP * (1 + shares[head])
            elif choice.cls is not FixedLength:
                kinds.append(step_kind(choice.cls, None))
                quiet[kinds[-1]] = IN_A_ROW * STEP
        steps: dict[str, Step] = {
            name: partial(machine.run, seconds) for name, seconds in quiet.items()
        }
        taken = repeated(
            steps[TARGET],
            steps,
            lambda: machine.now,
            None,
            Evaluation().timing_seconds,
            lambda taken: TimedSteps.of(taken, kinds).is_narrow,
        )
        return TimedSteps.of(taken, kinds)

    def _decoded(
        self, machine: Machine, settings: Iterable[Candidate], prompts: np.ndarray
    ) -> list[Measured]:
        """Return what decoding prompts with every setting in turns measures."""
        measured = [Measured(setting) for setting in settings]
        for prompt in prompts.tolist():
            for each in measured:
                setting = each.setting
                share = self.table.head_shares.get(setting.head or "", 0.0)
                rounds = []
                for tokens, drafted in self.of.rounds[setting.name][prompt].tolist():
                    drafting = machine.run(drafted * STEP * (1 + share))
                    verifying = machine.run(PASS)
                    rounds.append(DecodedRound(tokens, drafted, drafted, drafting, verifying))
                each.rounds.append(rounds)
                each.stats.append(_stats(rounds))
                each.load.append((0.0, 1.0))
        return measured


def _stats(rounds: list[DecodedRound]) -> DecodeStats:
    tokens = sum(each.num_tokens for each in rounds)
    drafted = sum(each.num_drafted for each in rounds)
    seconds = sum(each.seconds for each in rounds)
    return DecodeStats(tokens, drafted, 0, 0, len(rounds), drafted, seconds, 0.0)


@dataclass
class Tally:
    """How often evaluations said what."""

    runs: int = 0
    doubted: int = 0  # found decoded rounds unreliable
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
        assert report.answer
        answer = report.answer.comparison
        truth = simulation.truth
        used, head, fixed = (answer.choices[kind] for kind in (answer.use, Kind.HEAD, Kind.FIXED))
        wins = (
            answer.use not in (Kind.FIXED, Kind.ALONE)
            and used.gain is not None
            and used.gain.low > 1
        )
        gain = head.gain or Interval(0, 0, 0)
        self.runs += 1
        self.doubted += report.is_unreliable
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


def concluded(simulation: Simulation, runs: int, noise: Noise | None = None) -> Tally:
    """Return what so many evaluations concluded: at counted costs, or on a machine with noise."""
    rng = np.random.default_rng(1)
    tally = Tally()
    for _ in range(runs):
        tally.add(
            simulation,
            simulation.evaluate(noise, rng),
        )
    return tally


@lru_cache
def _populations() -> dict[str, Population]:
    """Return prompts that are alike, the same with eight heads and no other rules, and prompts of
    75 files that differ.
    """
    return {
        "alike": Population(1_500),
        "eight heads": Population(800, heads=8, error=1.0, headless=False),
        "files": Population(75, size=20, between_files=1.0),
    }


class Case(NamedTuple):
    """Evaluations of one kind."""

    population: str  # of `_populations`
    gain: float  # of the head over the best fixed length
    noise: Noise | None = None  # None: costs are counted
    num_prompts: tuple[int, int] = (100, 1_000)
    per_file: tuple[int, int] = (1, 1)


AS_PLAIN = (100, 100)  # the prompts of a plain `specheads evaluate`
IN_FILES = (4, 20)
CASES = {
    "no gain": Case("alike", 0.0),
    "no gain of eight heads": Case("eight heads", 0.0),
    "gain of 2 %": Case("alike", 0.02),
    "gain of 5 %": Case("alike", 0.05),
    "gain of 10 %": Case("alike", 0.10),
    "no gain, 50 files": Case("files", 0.0, per_file=IN_FILES),
    "gain of 5 %, 50 files": Case("files", 0.05, per_file=IN_FILES),
    "no gain, quiet machine": Case("alike", 0.0, QUIET, AS_PLAIN),
    "gain of 5 %, quiet machine": Case("alike", 0.05, QUIET, AS_PLAIN),
    "no gain, busy machine": Case("alike", 0.0, BUSY, AS_PLAIN),
    "no gain of eight heads, busy machine": Case("eight heads", 0.0, BUSY, AS_PLAIN),
    "gain of 5 %, busy machine": Case("alike", 0.05, BUSY, AS_PLAIN),
    "no gain, crowded machine": Case("alike", 0.0, CROWDED, AS_PLAIN),
    "gain of 5 %, crowded machine": Case("alike", 0.05, CROWDED, AS_PLAIN),
    "gain of 10 %, crowded machine": Case("alike", 0.10, CROWDED, AS_PLAIN),
}


def tally_of(case: Case, runs: int) -> Tally:
    """Return what so many evaluations of a case concluded."""
    population = _populations()[case.population]
    simulation = Simulation(population, case.gain, case.num_prompts, case.per_file)
    return concluded(simulation, runs, case.noise)


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    for name, case in CASES.items():
        print(f"{name}: {tally_of(case, runs)}", flush=True)
