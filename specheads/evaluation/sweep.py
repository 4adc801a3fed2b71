"""Decode the same prompts with many settings, interleaved, so that a slow minute of the machine
slows all of them.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from specheads.decoding.decoder import Baseline, SpeculativeDecoder
from specheads.decoding.engine import compile_ahead
from specheads.decoding.records import DecodeStats, Generation, Round
from specheads.decoding.stopping import StoppingRule
from specheads.evaluation.candidates import FIXED, OF_VERIFICATION, TARGET_ALONE, Candidate
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup
from specheads.load import NOTABLE, OthersLoad
from specheads.pair.pair import Pair
from specheads.progress import Advance, progress, waiting
from specheads.prompts.prompt import EncodedPrompt
from specheads.replay.intervals import Groups, interval, resample_counts, sums
from specheads.replay.replay import Counts, Replayed
from specheads.storage.journal import Entry, Journal

logger = logging.getLogger(__name__)

Decoder = SpeculativeDecoder | Baseline


class DecodedRound(NamedTuple):
    """The counts and the seconds of one round."""

    num_tokens: int  # emitted
    num_drafted: int
    num_draft_calls: int
    draft_seconds: float
    other_seconds: float  # of verification and the steps after it

    @property
    def is_whole(self) -> bool:
        """Whether it drafted, and all drafted tokens were accepted."""
        return self.num_tokens > self.num_drafted > 0

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.other_seconds


@dataclass
class Measured:
    """The results of one setting: per prompt its totals over repeats, and all of its rounds."""

    setting: Candidate
    stats: list[DecodeStats] = field(default_factory=list)
    rounds: list[list[DecodedRound]] = field(default_factory=list)  # by prompt
    # Of each prompt, the cores that other processes took from this one while all settings decoded
    # it, and its seconds.
    load: list[tuple[float, float]] = field(default_factory=list)

    @property
    def all_rounds(self) -> list[DecodedRound]:
        return list(chain.from_iterable(self.rounds))

    @property
    def pace(self) -> np.ndarray:
        """The seconds of each round (rounds,), for each of its tokens."""
        return np.array([each.seconds / each.num_tokens for each in self.all_rounds])

    @property
    def cores_taken(self) -> float:
        """The mean number of cores that other processes took from this one."""
        if not self.load:
            return 0.0
        cores, seconds = np.array(self.load).T
        return float(np.average(cores, weights=seconds))

    @property
    def token_seconds(self) -> np.ndarray:
        """The seconds of each emitted token.

        Those of a round arrive together and share its seconds equally.
        """
        return np.repeat(self.pace, [each.num_tokens for each in self.all_rounds])

    @property
    def counts(self) -> Counts:
        """The counts of the rounds on each prompt, as replay has them."""
        prompt = np.repeat(np.arange(len(self.rounds)), [len(each) for each in self.rounds])
        tokens = np.array([each.num_tokens for each in self.all_rounds])
        drafted = np.array([each.num_drafted for each in self.all_rounds])
        accepted = np.minimum(tokens - 1, drafted)
        nothing = np.zeros_like(prompt)
        replayed = Replayed(prompt, nothing, nothing, drafted, accepted, tokens)
        return replayed.per_prompt(len(self.rounds))


@dataclass(frozen=True)
class Sweep:
    """How prompts are decoded, the same for all settings."""

    pair: Pair
    settings: (
        Evaluation  # repeats decode each prompt again with another seed, which all settings share
    )
    # The memory's positions, enough for every prompt and its response; sweeps with the same share
    # compiled steps
    window: int

    def run(
        self,
        settings: Sequence[Candidate],
        prompts: Sequence[Sequence[int]],
        journal: Journal | None = None,
        on_generation: Advance = lambda count: None,
    ) -> list[Measured]:
        """Decode every prompt `repeats` times with every setting in turns.

        Journalled prompts are not decoded again.
        """
        decoders = self._decoders(settings)
        start = time.perf_counter()
        with waiting("loading decoding steps"):
            compile_ahead(decoder.prepare for decoder in decoders)
            for decoder in decoders:
                decoder.warm_up()
        logger.info(
            "the engine was ready after %.1f s, which is excluded from timings",
            time.perf_counter() - start,
        )
        for decoder in decoders:
            decoder.generate(prompts[0], self.settings.max_new_tokens, self.settings.seed)
        measured = [Measured(setting) for setting in settings]
        done = {} if journal is None else journal.entries
        on_generation(len(done) * self.settings.repeats * len(settings))
        for number, prompt in enumerate(prompts):
            entry = done.get(number)
            if entry is None:
                entry = self._decoded(decoders, number, prompt, on_generation)
                if journal is not None:
                    journal.add(number, entry)
            for decoded, stats, rounds in zip(
                measured, entry["stats"], entry["rounds"], strict=True
            ):
                repeats = [DecodeStats(**part) for part in stats]
                decoded.stats.append(DecodeStats.total(repeats))
                decoded.rounds.append([DecodedRound(*numbers) for numbers in rounds])
                decoded.load.append(entry["load"])
        return measured

    def _decoded(
        self,
        decoders: Sequence[Decoder],
        number: int,
        prompt: Sequence[int],
        on_generation: Advance,
    ) -> Entry:
        """Return the results of every setting for prompt `number`: `rounds`, and `stats` of each
        repeat.
        """
        stats: list[list[dict[str, object]]] = [[] for _ in decoders]
        rounds: list[list[DecodedRound]] = [[] for _ in decoders]
        load = OthersLoad()
        start = time.perf_counter()
        for repeat in range(self.settings.repeats):
            seed = response_seed(self.settings.seed, number, repeat)
            for turn in range(len(decoders)):
                index = (turn + number + repeat) % len(decoders)
                generation: Generation = decoders[index].generate(
                    prompt, self.settings.max_new_tokens, seed
                )
                stats[index].append(asdict(generation.stats))
                rounds[index] += map(_decoded_round, generation.rounds)
                on_generation(1)
        taken = load.taken(torch.get_num_threads())
        return {
            "stats": stats,
            "rounds": rounds,
            "load": (taken, time.perf_counter() - start),
        }

    def _decoders(self, settings: Sequence[Candidate]) -> list[Decoder]:
        """Return one decoder per setting.

        All share memory that is large enough for the longest drafts.
        """
        longest: StoppingRule | None = None
        for each in settings:
            rule = each.live
            if rule and (longest is None or rule.max_tokens > longest.max_tokens):
                longest = rule
        how = self.settings
        shared = SpeculativeDecoder(
            self.pair, how.drafting, longest, how.verification, how.warp, how.engine, self.window
        )
        baseline = Baseline(self.pair, how.warp, shared.target_engine)
        decoders = list[Decoder]()
        for each in settings:
            if each.live:
                decoders.append(shared.with_stopping(each.live, each.verification))
            else:
                decoders.append(baseline)
        return decoders


def _decoded_round(each: Round) -> DecodedRound:
    return DecodedRound(
        len(each.tokens),
        each.num_drafted,
        each.num_draft_calls,
        each.draft_seconds,
        each.verify_seconds + each.commit_seconds,
    )


def response_seed(seed: int, number: int, repeat: int) -> int:
    """Return the seed of a response to prompt `number`, which all settings share."""
    return int(np.random.SeedSequence([seed, number, repeat]).generate_state(1)[0])


def sweep_settings(
    rules: Sequence[Candidate], of_verification: StoppingRule | None = None
) -> list[Candidate]:
    """Return the target alone, every candidate that can decode, and the verification rule's own
    stopping rule.
    """
    settings = [TARGET_ALONE, *(rule for rule in rules if rule.live is not None)]
    if of_verification is not None:
        name = str(of_verification.compile_key).replace("_", " ")
        settings.append(
            Candidate(
                OF_VERIFICATION,
                name,
                of_verification,
                of_verification,
                parameters={"num_tokens": 0},
            )
        )
    return settings


def decode(
    setup: Setup, name: str, settings: Sequence[Candidate], prompts: Sequence[EncodedPrompt]
) -> list[Measured]:
    """Decode with every setting; finished prompts are kept in the journal `name`."""
    evaluation = setup.settings
    total = len(settings) * len(prompts) * evaluation.repeats
    logger.info(
        "%s: %d settings x %d prompts x %d repeats = %d responses of at most %d tokens, into %s",
        name,
        len(settings),
        len(prompts),
        evaluation.repeats,
        total,
        evaluation.max_new_tokens,
        setup.run_folder,
    )
    names = list[tuple[str, str]]()
    for setting in settings:
        verification = setting.verification
        names.append((setting.name, repr(verification and verification.compile_key)))
    journal = setup.journal(name, prompts, settings=names)
    sweep = Sweep(setup.pair, evaluation, setup.window)
    with progress("decoding", total) as advance:
        return sweep.run(settings, [ids for _, ids in prompts], journal, advance)


LARGEST_SPREAD = 1.2  # mean over median of the target's steps
FEWEST_GROUPS = 8  # an interval over fewer groups of prompts means nothing
REMEDY = "live figures need a quiet machine"


def doubts_of(measured: Sequence[Measured], groups: Groups) -> Iterator[str]:
    """Yield why the times of decoded rounds, those of the target alone first, are unreliable.

    `groups` are those of the decoded prompts.
    """
    yield from doubts_of_machine(measured[0])
    num_groups = len(set(groups))
    if num_groups < FEWEST_GROUPS:
        yield (
            f"Only {num_groups} independent prompts were decoded, at least {FEWEST_GROUPS} are"
            " needed for intervals; decode more (num_live_prompts=)."
        )


def disagreements_of(
    measured: Sequence[Measured], predicted: Mapping[str, np.ndarray], groups: Groups
) -> Iterator[str]:
    """Yield where decoded and predicted speeds differ by more than their intervals: over the target
    alone, and over a fixed length.

    Args:
        predicted: by setting the speed-ups (1 + R,) on the decoded prompts that a recording
            predicts.
        groups: those of the decoded prompts; too few of them disagree with nothing.
    """
    if len(set(groups)) < FEWEST_GROUPS:
        return
    decoded = speedups_of(measured, groups)
    baselines = [TARGET_ALONE.name]
    for each in measured:
        if each.setting.rule_name == FIXED and each.setting.name in predicted:
            baselines.append(each.setting.name)
    known = {TARGET_ALONE.name: np.ones(1), **predicted}
    for baseline in baselines:
        for name in predicted:
            if name in baselines[: 1 + baselines.index(baseline)]:
                continue
            here = interval(decoded[name] / decoded[baseline])
            expected = interval(known[name] / known[baseline])
            if here.low > expected.high or here.high < expected.low:
                yield (
                    f"{name} over {baseline} {expected.value:.2f}× [{expected.low:.2f},"
                    f" {expected.high:.2f}] by replay, {here.value:.2f}× [{here.low:.2f},"
                    f" {here.high:.2f}] decoded"
                )


def doubts_of_machine(alone: Measured) -> Iterator[str]:
    """Yield why the times of decoded rounds, of the target alone, are those of a busy machine."""
    busy = "The machine was busy"
    if alone.cores_taken > NOTABLE:
        yield (
            f"{busy}: other processes took {alone.cores_taken:.1f} of its cores while it decoded;"
            f" {REMEDY}."
        )
    spread = alone.pace.mean() / np.median(alone.pace)
    if spread > LARGEST_SPREAD:
        what = f"a step of the target alone took {spread:.2f} times its median on average"
        yield f"{busy}: {what}, normally at most {LARGEST_SPREAD}; {REMEDY}."


def speedups_of(measured: Sequence[Measured], groups: Groups) -> dict[str, np.ndarray]:
    """Return by setting its measured speed-up (1 + R,) over the target alone, which comes first."""
    resamples = resample_counts(groups)
    speeds = {each.setting.name: sums(each.stats, resamples).tokens_per_second for each in measured}
    alone = speeds[TARGET_ALONE.name]
    return {name: speed / alone for name, speed in speeds.items()}
