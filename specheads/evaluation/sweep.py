"""Decode the same prompts with many settings, interleaved, so that a slow minute of the machine slows all of them."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from specheads.decoding.decoder import Baseline, SpeculativeDecoder
from specheads.decoding.drafting import Drafting
from specheads.decoding.engine import compile_ahead
from specheads.decoding.load_aware import LengthPolicy
from specheads.decoding.records import DecodeStats, Generation, Round
from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.verification import BlockVerification, VerificationRule
from specheads.evaluation.candidates import FIXED, Candidate, kind_of
from specheads.evaluation.intervals import token_seconds
from specheads.evaluation.report import MEASURED, LiveRow, RuleFields, rule_fields
from specheads.evaluation.rule_costs import CostTable
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.replay.cost import CostFit, RoundTimes, fit_costs, fits_of_halves
from specheads.replay.replay import rounds_by_length
from specheads.storage.journal import Entry, Journal

logger = logging.getLogger(__name__)

RoundNumbers = list[float]  # see round_numbers
Decoder = SpeculativeDecoder | Baseline
OF_VERIFICATION = "of_verification"  # the family of a verification rule's own stopping rule


@dataclass(frozen=True)
class Setting(RuleFields):
    """One row of the sweep; `rule` is None for the target alone.

    `family` is `target`, a family of candidates, OF_VERIFICATION, or the name of another verification rule.
    """

    name: str
    family: str
    value: float | None
    rule: StoppingRule | None
    verification: VerificationRule | None = None  # None: that of the sweep
    policy: LengthPolicy | None = None  # on the load, of batches; then there is no rule

    @property
    def kind(self) -> str:
        """The name of everything that decides the rule's cost: its class, its head, and another verification rule."""
        return kind_of(self.rule, self.head) + (f" under {self.verification.label}" if self.verification else "")

    def is_lossless(self, by_default: bool) -> bool:
        """Whether the output has the target's distribution; `by_default`: whether it has under the sweep's verification rule."""
        if self.rule is None:
            return True
        return by_default if self.verification is None else self.verification.lossless


TARGET_ALONE = Setting("target alone", "target", 0, None)


@dataclass
class Measured:
    """The results of one setting: per prompt its totals over repeats, all of its rounds, and what each response has."""

    setting: Setting
    stats: list[DecodeStats] = field(default_factory=list)
    rounds: list[list[RoundNumbers]] = field(default_factory=list)
    responses: list[list[list[int]]] = field(default_factory=list)  # their tokens; empty where they are not kept

    @property
    def token_seconds(self) -> np.ndarray:
        """The seconds of each emitted token."""
        tokens, _, _, *seconds = np.array([numbers for prompt in self.rounds for numbers in prompt]).T
        return token_seconds(tokens, sum(seconds))

    def predicted_seconds(self, costs: StepCosts) -> np.ndarray:
        """Return the seconds (P,) that costs predict for each prompt's rounds."""
        drafted = [[int(numbers[1]) for numbers in prompt] for prompt in self.rounds]
        prompt = np.repeat(np.arange(len(drafted)), [len(lengths) for lengths in drafted])
        rounds = rounds_by_length(prompt, np.concatenate(drafted).astype(int), len(drafted))
        return costs.seconds(np.array([part.num_draft_calls for part in self.stats]), rounds)


def kinds_of(measured: Sequence[Measured]) -> dict[str, bool]:
    """Return the kinds of rules that were decoded, and whether each is a fixed length under the sweep's verification rule."""
    drafting = [decoded.setting for decoded in measured if decoded.setting.rule is not None]
    return {setting.kind: setting.family == FIXED and setting.verification is None for setting in drafting}


def round_times(measured: Sequence[Measured]) -> RoundTimes:
    """Return the times of the rounds of all settings that draft; those of the target alone say nothing about a round's costs.

    Responses to the same prompt have numbers of the same parity, so that both halves of the responses have every setting.
    """
    kinds = {kind: number for number, kind in enumerate(kinds_of(measured))}
    drafting = [decoded for decoded in measured if decoded.setting.rule is not None]
    most = 2 * max(len(decoded.rounds) for decoded in drafting)
    prompts = [
        (kinds[decoded.setting.kind], number * most + place, prompt)
        for number, decoded in enumerate(drafting)
        for place, prompt in enumerate(decoded.rounds)
    ]
    rows = np.array([numbers for *_, prompt in prompts for numbers in prompt])
    _, drafted, draft_calls, draft_seconds, target_seconds = rows.T
    lengths = [len(prompt) for *_, prompt in prompts]
    rule, response = (np.repeat(column, lengths) for column in list(zip(*prompts, strict=True))[:2])
    return RoundTimes(draft_calls.astype(int), drafted.astype(int), draft_seconds, target_seconds, rule, response)


def sweep_settings(
    candidates: Sequence[Candidate],
    of_verification: StoppingRule | None = None,
    others: Mapping[str, VerificationRule] | None = None,
) -> list[Setting]:
    """Return everything that is decoded.

    That is the target alone, every candidate that can decode, the verification rule's own stopping rule, and fixed lengths
    under other verification rules.
    """
    settings = [TARGET_ALONE]
    for candidate in candidates:
        if candidate.live is not None:
            values = candidate.name, candidate.family, candidate.value, candidate.live
            settings.append(Setting(*values, **rule_fields(candidate)))
    if of_verification is not None:
        settings.append(Setting(str(of_verification.compile_key).replace("_", " "), OF_VERIFICATION, 0, of_verification))
    for name, rule in (others or {}).items():
        lossy = "" if rule.lossless else ", lossy"
        for fixed in (candidate for candidate in candidates if candidate.family == FIXED):
            settings.append(Setting(f"{name} K={fixed.value}{lossy}", name, fixed.value, fixed.live, rule, **rule_fields(fixed)))
    return settings


def under_block(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings that draft, under block verification."""
    rule = BlockVerification()
    return [
        replace(setting, name=f"{setting.name}, {rule.label}", family=rule.name, verification=rule)
        for setting in settings
        if setting.rule is not None
    ]


@dataclass(frozen=True)
class Sweep:
    """How prompts are decoded, the same for all settings."""

    pair: Pair
    warp: Warp
    max_new_tokens: int
    repeats: int = 1  # of each prompt, each with another seed, which all settings share
    seed: int = 0
    engine: str = "auto"
    drafting: Drafting | None = None
    verification: VerificationRule | None = None
    # The memory's positions, enough for every prompt and its response; compiled steps depend on it, so sweeps with the same
    # window share them. None: as few as are enough.
    window: int | None = None
    keeps_responses: bool = False

    def run(
        self,
        settings: Sequence[Setting],
        prompts: Sequence[Sequence[int]],
        journal: Journal | None = None,
        on_generation: Callable[[int], None] = lambda count: None,
    ) -> list[Measured]:
        """Decode every prompt `repeats` times with every setting; return the results of each setting.

        The order of settings rotates from prompt to prompt and from repeat to repeat. Every setting first decodes one prompt
        that is not counted. Prompts that are in the journal are not decoded again.

        Args:
            on_generation: called with the number of responses that are done.
        """
        decoders = self._decoders(settings, prompts)
        start = time.perf_counter()
        compile_ahead(decoder.prepare for decoder in decoders)
        for decoder in decoders:
            decoder.warm_up()
        logger.info("the engine was ready after %.1f s, which no figure contains", time.perf_counter() - start)
        for decoder in decoders:
            decoder.generate(prompts[0], self.max_new_tokens, self.seed)
        measured = [Measured(setting) for setting in settings]
        done = {} if journal is None else journal.entries
        on_generation(len(done) * self.repeats * len(settings))
        for number, prompt in enumerate(prompts):
            if number in done:
                entry = done[number]
            else:
                entry = self._decoded(decoders, number, prompt, on_generation)
                if journal is not None:
                    journal.add(number, entry)
            for decoded, stats, rounds in zip(measured, entry["stats"], entry["rounds"], strict=True):
                decoded.stats.append(DecodeStats.total([DecodeStats(**part) for part in stats]))
                decoded.rounds.append(rounds)
            for decoded, responses in zip(measured, entry.get("responses", ()), strict=self.keeps_responses):
                decoded.responses.append(responses)
        return measured

    def _decoded(
        self, decoders: Sequence[Decoder], number: int, prompt: Sequence[int], on_generation: Callable[[int], None]
    ) -> Entry:
        """Return the results of every setting for prompt `number`: `rounds`, and of each repeat `stats` and what else is kept."""
        names = ["responses"] * self.keeps_responses
        kept: Entry = {name: [[] for _ in decoders] for name in ("stats", "rounds", *names)}
        for repeat in range(self.repeats):
            seed = response_seed(self.seed, number, repeat)
            for turn in range(len(decoders)):
                index = (turn + number + repeat) % len(decoders)
                generation: Generation = decoders[index].generate(prompt, self.max_new_tokens, seed)
                kept["stats"][index].append(asdict(generation.stats))
                kept["rounds"][index] += [_round_numbers(each) for each in generation.rounds]
                if self.keeps_responses:
                    kept["responses"][index].append(generation.tokens.tolist())
                on_generation(1)
        return kept

    def _decoders(self, settings: Sequence[Setting], prompts: Sequence[Sequence[int]]) -> list[Decoder]:
        """Return one decoder per setting; all share memory that is large enough for the longest drafts."""
        window = self.window or min(self.pair.window, max(map(len, prompts)) + self.max_new_tokens)
        rules = [setting.rule for setting in settings if setting.rule is not None]
        longest = max(rules, key=lambda rule: rule.max_tokens, default=None)
        shared = SpeculativeDecoder(self.pair, self.drafting, longest, self.verification, self.warp, self.engine, window)
        baseline = Baseline(self.pair, self.warp, shared.target_engine)

        def decoder_of(setting: Setting) -> Decoder:
            return baseline if setting.rule is None else shared.with_stopping(setting.rule, setting.verification)

        return [decoder_of(setting) for setting in settings]


def response_seed(seed: int, number: int, repeat: int) -> int:
    """Return the seed of a response to prompt `number`, which all settings share."""
    return int(np.random.SeedSequence([seed, number, repeat]).generate_state(1)[0])


def _round_numbers(decoded_round: Round) -> RoundNumbers:
    """Return the numbers of a round that are kept.

    They are its tokens, its drafted tokens, the draft's forward passes, the seconds of drafting, and those of the steps after it.
    """
    target_seconds = decoded_round.verify_seconds + decoded_round.commit_seconds
    counts = [len(decoded_round.tokens), decoded_round.num_drafted, decoded_round.num_draft_calls]
    return [*counts, decoded_round.draft_seconds, target_seconds]


LEAST_R_SQUARED = 0.9  # over responses that a fit had not seen
LARGEST_SPREAD = 1.2  # mean over median of the target's steps
LARGEST_HALF_WIDTH = 0.1  # of a speed's 95 % interval, as a share of the speed
FEWEST_GROUPS = 8  # of prompts; an interval over fewer means nothing
REMEDY = "run it again on a quiet machine, or leave decoding out (live=none)"


def alone_steps(alone: Measured) -> np.ndarray:
    """Return the seconds (rounds,) of each step of the target alone, per token."""
    tokens, _, _, *seconds = np.array([numbers for prompt in alone.rounds for numbers in prompt]).T
    return sum(seconds) / tokens


def doubts_of(alone: Measured, fit: CostFit, live: Sequence[LiveRow], num_groups: int) -> list[str]:
    """Return the reasons why the measured times are not to be trusted; none if they are.

    Args:
        alone: the target without a draft.
        fit: the costs that were fitted to all rounds.
        live: the settings that were decoded.
        num_groups: the groups of prompts (files, where prompts come from files) that intervals are over.
    """
    doubts, steps = [], alone_steps(alone)
    spread = steps.mean() / np.median(steps)
    if spread > LARGEST_SPREAD:
        doubts.append(
            f"The machine was busy: a step of the target alone took {spread:.2f} times its median on average, normally at most "
            f"{LARGEST_SPREAD}; {REMEDY}."
        )
    if fit.r_squared is None:
        doubts.append(
            "Too few responses were decoded to tell how well costs explain their times; decode more (num_live_prompts=)."
        )
    elif fit.r_squared < LEAST_R_SQUARED:
        doubts.append(
            f"The machine was busy: the fitted costs explain {fit.r_squared:.2f} of the variance of the times of responses "
            f"that they were not fitted to (R², normally at least {LEAST_R_SQUARED}); {REMEDY}."
        )
    if not fit.costs.draft_seconds and any(rule.step_seconds for rule in fit.rules.values()):
        doubts.append(f"The machine was busy: no cost of a draft step could be told from these rounds; {REMEDY}.")
    if num_groups < FEWEST_GROUPS:
        doubts.append(
            f"Only {num_groups} independent prompts were decoded, at least {FEWEST_GROUPS} are needed for intervals; decode more "
            "(num_live_prompts=)."
        )
    widths = {
        row.name: (row.tokens_per_second.high - row.tokens_per_second.low) / 2 / row.tokens_per_second.value for row in live
    }
    widest = max(widths, key=widths.__getitem__, default=None)
    if widest is not None and widths[widest] > LARGEST_HALF_WIDTH:
        doubts.append(
            f"The interval of the speed of {widest} is ±{widths[widest]:.0%}, and at most ±{LARGEST_HALF_WIDTH:.0%} is "
            "accepted; decode more prompts (num_live_prompts=), on a quiet machine."
        )
    return doubts


def with_measured(
    table: CostTable, measured: Sequence[Measured], sizes: Mapping[str, float], shares: Mapping[str, float] | None = None
) -> CostTable:
    """Return a table with the measured costs of the decoded rules.

    Args:
        measured: the decoded settings, the target alone among them.
        sizes: by head, its counted share of a draft step; a head that was not decoded gets the cost of decoded heads of similar
            sizes.
        shares: by the kind of a rule, what it adds to a draft step as a share of the step, where steps were timed.
    """
    times, kinds, shares = round_times(measured), kinds_of(measured), shares or {}
    alone = np.concatenate([alone_steps(decoded) for decoded in measured if decoded.setting == TARGET_ALONE])
    speed = float(1 / np.median(alone))

    def fitted(fit: CostFit) -> CostTable:
        heads = _head_seconds(fit, measured, sizes)
        costs = {MEASURED: fit.costs, **table.at_ratios().costs}
        return CostTable(costs, table.head_shares, fit, heads, _untimed(fit, measured, kinds), speed)

    halves = fits_of_halves(times, kinds, shares)
    return replace(fitted(fit_costs(times, kinds, shares)), halves=() if halves is None else tuple(map(fitted, halves)))


def _head_seconds(fit: CostFit, measured: Sequence[Measured], sizes: Mapping[str, float]) -> dict[str, float]:
    """Return by head the seconds that it adds to a draft step: the mean of its rules', or interpolated between other heads."""
    steps: dict[str, list[float]] = {}
    heads = {decoded.setting.kind: decoded.setting.head for decoded in measured if decoded.setting.verification is None}
    for kind, head in heads.items():
        if head is not None:
            steps.setdefault(head, []).append(fit.rules[kind].step_seconds)
    timed = {head: float(np.mean(seconds)) for head, seconds in steps.items()}
    if not timed:
        return {}
    order = sorted(timed, key=sizes.__getitem__)
    between = np.interp(list(sizes.values()), [sizes[head] for head in order], [timed[head] for head in order])
    return dict(zip(sizes, between.tolist(), strict=True)) | timed


def _untimed(fit: CostFit, measured: Sequence[Measured], kinds: Mapping[str, bool]) -> dict[bool, RuleCosts]:
    """Return the median of the costs that timed kinds of rules add, by whether they have a head.

    The costs per step of rules with a head are left out, because those of heads are known separately.
    """
    # Untimed rules are replayed under the sweep's verification, so what was decoded under another one says nothing of them.
    has_head = {
        decoded.setting.kind: decoded.setting.head is not None for decoded in measured if decoded.setting.verification is None
    }
    medians = {}
    for head in (False, True):
        timed = [fit.rules[kind] for kind, plain in kinds.items() if not plain and has_head.get(kind) == head]
        if timed:
            step = 0.0 if head else float(np.median([rule.step_seconds for rule in timed]))
            medians[head] = RuleCosts(step, float(np.median([rule.round_seconds for rule in timed])))
    return medians
