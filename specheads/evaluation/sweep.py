"""Decode the same prompts with many settings, interleaved, so that a slow minute of the machine
slows all of them.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch

from specheads.decoding.decoder import Baseline, SpeculativeDecoder
from specheads.decoding.engine import compile_ahead
from specheads.decoding.records import DecodeStats, Generation
from specheads.decoding.step_costs import RuleCosts
from specheads.decoding.step_times import StepTimes
from specheads.decoding.stopping import StoppingRule
from specheads.evaluation.candidates import (
    FIXED,
    OF_VERIFICATION,
    TARGET_ALONE,
    Candidate,
    CostTable,
)
from specheads.evaluation.report import MEASURED
from specheads.evaluation.settings import Evaluation
from specheads.load import NOTABLE, OthersLoad
from specheads.pair.pair import Pair
from specheads.replay.cost import CostFit, RoundTimes, fit_costs
from specheads.replay.intervals import Groups
from specheads.storage.journal import Entry, Journal

logger = logging.getLogger(__name__)

Decoder = SpeculativeDecoder | Baseline


@dataclass
class Measured:
    """The results of one setting: per prompt its totals over repeats, and all of its rounds.

    Of a round: its tokens, drafted tokens, the draft's forward passes, the seconds of drafting, and
    those of the steps after it.
    """

    setting: Candidate
    stats: list[DecodeStats] = field(default_factory=list)
    rounds: list[list[list[float]]] = field(default_factory=list)
    # Of each prompt, the cores that other processes took from this one while all settings decoded
    # it, and its seconds.
    load: list[tuple[float, float]] = field(default_factory=list)

    @property
    def pace(self) -> np.ndarray:
        """The seconds of each round (rounds,), for each of its tokens."""
        tokens, _, _, *seconds = np.array(
            [numbers for prompt in self.rounds for numbers in prompt]
        ).T
        return sum(seconds) / tokens

    @property
    def cores_taken(self) -> float:
        """The mean number of cores that other processes took from this one."""
        return sum(cores * seconds for cores, seconds in self.load) / max(
            1e-9, sum(seconds for _, seconds in self.load)
        )

    @property
    def token_seconds(self) -> np.ndarray:
        """The seconds of each emitted token.

        Those of a round arrive together and share its seconds equally.
        """
        return np.repeat(
            self.pace, [int(numbers[0]) for prompt in self.rounds for numbers in prompt]
        )


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
        on_generation: Callable[[int], None] = lambda count: None,
    ) -> list[Measured]:
        """Decode every prompt `repeats` times with every setting in turns.

        Journalled prompts are not decoded again.
        """
        decoders = self._decoders(settings)
        start = time.perf_counter()
        compile_ahead(decoder.prepare for decoder in decoders)
        for decoder in decoders:
            decoder.warm_up()
        logger.info(
            "the engine was ready after %.1f s, which no figure contains",
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
                decoded.stats.append(DecodeStats.total([DecodeStats(**part) for part in stats]))
                decoded.rounds.append(rounds)
                decoded.load.append(entry["load"])
        return measured

    def _decoded(
        self,
        decoders: Sequence[Decoder],
        number: int,
        prompt: Sequence[int],
        on_generation: Callable[[int], None],
    ) -> Entry:
        """Return the results of every setting for prompt `number`: `rounds`, and `stats` of each
        repeat.
        """
        kept: Entry = {name: [[] for _ in decoders] for name in ("stats", "rounds")}
        load = OthersLoad()
        start = time.perf_counter()
        for repeat in range(self.settings.repeats):
            seed = response_seed(self.settings.seed, number, repeat)
            for turn in range(len(decoders)):
                index = (turn + number + repeat) % len(decoders)
                generation: Generation = decoders[index].generate(
                    prompt, self.settings.max_new_tokens, seed
                )
                kept["stats"][index].append(asdict(generation.stats))
                kept["rounds"][index] += [
                    [
                        len(r.tokens),
                        r.num_drafted,
                        r.num_draft_calls,
                        r.draft_seconds,
                        r.verify_seconds + r.commit_seconds,
                    ]
                    for r in generation.rounds
                ]
                on_generation(1)
        return kept | {"load": (load.taken(torch.get_num_threads()), time.perf_counter() - start)}

    def _decoders(self, settings: Sequence[Candidate]) -> list[Decoder]:
        """Return one decoder per setting.

        All share memory that is large enough for the longest drafts.
        """
        longest = max(
            (each.live for each in settings if each.live),
            key=lambda rule: rule.max_tokens,
            default=None,
        )
        how = self.settings
        shared = SpeculativeDecoder(
            self.pair, how.drafting, longest, how.verification, how.warp, how.engine, self.window
        )
        baseline = Baseline(self.pair, how.warp, shared.target_engine)
        return [
            shared.with_stopping(each.live, each.verification) if each.live else baseline
            for each in settings
        ]


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
            Candidate(OF_VERIFICATION, name, of_verification, of_verification, {"num_tokens": 0})
        )
    return settings


LARGEST_SPREAD = 1.2  # mean over median of the target's steps
FEWEST_GROUPS = 8  # an interval over fewer groups of prompts means nothing
REMEDY = "live figures need a quiet machine"


def doubts_of(measured: Sequence[Measured], fit: CostFit, groups: Groups) -> Iterator[str]:
    """Yield why the times of all rounds, those of the target alone first, and what follows from
    them are not to be trusted.
    """
    alone = measured[0]
    num_groups = len(set(groups))
    busy = "The machine was busy"
    more = "decode more (num_live_prompts=)"
    if alone.cores_taken > NOTABLE:
        yield (
            f"{busy}: other processes took {alone.cores_taken:.1f} of its cores while it decoded;"
            f" {REMEDY}."
        )
    spread = alone.pace.mean() / np.median(alone.pace)
    if spread > LARGEST_SPREAD:
        what = f"a step of the target alone took {spread:.2f} times its median on average"
        yield f"{busy}: {what}, normally at most {LARGEST_SPREAD}; {REMEDY}."
    if not fit.costs.draft_seconds and any(rule.step_seconds for rule in fit.rules.values()):
        yield f"{busy}: no cost of a draft step could be told from these rounds; {REMEDY}."
    if num_groups < FEWEST_GROUPS:
        yield (
            f"Only {num_groups} independent prompts were decoded, at least {FEWEST_GROUPS} are"
            f" needed for intervals; {more}."
        )


def round_times(measured: Sequence[Measured]) -> tuple[RoundTimes, dict[str, bool]]:
    """Return the times of the rounds of all settings that draft, and by the kind of their rules
    whether it is a plain length.
    """
    drafting = [decoded for decoded in measured if decoded.setting.live is not None]
    kinds = {
        each.setting.kind: each.setting.family == FIXED and each.setting.verification is None
        for each in drafting
    }
    # Responses to a prompt have numbers of the same parity, so that both halves of the responses
    # have every setting.
    numbered = list(kinds)
    most = 2 * max(len(decoded.rounds) for decoded in drafting)
    rows = [
        (*numbers[1:], numbered.index(decoded.setting.kind), number * most + place)
        for number, decoded in enumerate(drafting)
        for place, prompt in enumerate(decoded.rounds)
        for numbers in prompt
    ]
    drafted, draft_calls, draft_seconds, target_seconds, rule, response = np.array(rows).T
    draft_calls, drafted, rule, response = (
        column.astype(int) for column in (draft_calls, drafted, rule, response)
    )
    return RoundTimes(draft_calls, drafted, draft_seconds, target_seconds, rule, response), kinds


def with_measured(
    table: CostTable,
    measured: Sequence[Measured],
    sizes: Mapping[str, float],
    shares: Mapping[str, float] | None = None,
    ends: Sequence[StepTimes] = (),
) -> CostTable:
    """Return a table with the measured costs of the decoded rules.

    Args:
        sizes: by head, its counted share of a draft step, by which heads that were not decoded get
            costs of others.
        shares: by the kind of a rule, what it adds to a draft step as a share of the step, where
            steps were timed.
        ends: times of steps, in place of those of rounds, at the low end of their range, in the
            middle, and at the high end.
    """
    times, kinds = round_times(measured)
    # Untimed rules are replayed under the sweep's verification, so what was decoded under another
    # one says nothing of them.
    heads = {
        each.setting.kind: each.setting.head
        for each in measured
        if each.setting.verification is None
    }
    alone = np.concatenate(
        [decoded.pace for decoded in measured if decoded.setting == TARGET_ALONE]
    )

    def fitted(fit: CostFit) -> CostTable:
        added = _head_seconds(fit, heads, sizes), _untimed(fit, kinds, heads)
        seconds = fit.costs.target_seconds if ends else float(np.median(alone))
        return CostTable(
            {MEASURED: fit.costs, **table.costs}, table.head_shares, fit, *added, 1 / seconds
        )

    if ends:
        steps = {each.setting.kind: each.setting.step_kind for each in measured}
        added = [
            {kind: times.rules.get(steps[kind], RuleCosts()) for kind in kinds} for times in ends
        ]
        low, middle, high = (
            fitted(CostFit(times.costs, rules)) for times, rules in zip(ends, added, strict=True)
        )
        return replace(middle, ends=(low, middle, high))
    fit, halves = fit_costs(times, kinds, shares or {})
    return replace(fitted(fit), halves=tuple(map(fitted, halves or ())))


def _head_seconds(
    fit: CostFit, heads: Mapping[str, str | None], sizes: Mapping[str, float]
) -> dict[str, float]:
    """Return by head the seconds that it adds to a draft step: the mean of its rules', or
    interpolated between other heads.
    """
    steps: dict[str, list[float]] = {}
    for kind, head in heads.items():
        if head is not None:
            steps.setdefault(head, []).append(fit.rules[kind].step_seconds)
    timed = {head: float(np.mean(seconds)) for head, seconds in steps.items()}
    if not timed:
        return {}
    order = sorted(timed, key=sizes.__getitem__)
    between = np.interp(
        list(sizes.values()), [sizes[head] for head in order], [timed[head] for head in order]
    )
    return dict(zip(sizes, between.tolist(), strict=True)) | timed


def _untimed(
    fit: CostFit, kinds: Mapping[str, bool], heads: Mapping[str, str | None]
) -> dict[bool, RuleCosts]:
    """Return the median costs that timed kinds of rules add, by whether they have a head, whose own
    step is known separately.
    """
    timed: dict[bool, list[RuleCosts]] = {}
    for kind, is_fixed in kinds.items():
        if not is_fixed and kind in heads:
            timed.setdefault(heads[kind] is not None, []).append(fit.rules[kind])
    return {
        head: RuleCosts(
            0.0 if head else float(np.median([rule.step_seconds for rule in rules])),
            float(np.median([rule.round_seconds for rule in rules])),
        )
        for head, rules in timed.items()
    }
