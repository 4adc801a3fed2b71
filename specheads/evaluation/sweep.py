"""Decode the same prompts with many settings, interleaved, so that a slow minute of the machine falls on all of them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from specheads.decoding.baseline import Baseline
from specheads.decoding.block_search import BlockSearch
from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.drafting import Drafting
from specheads.decoding.records import DecodeStats, Generation, Round
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.verification import VerificationRule
from specheads.evaluation.candidate import FIXED, Candidate, kind_of
from specheads.pair import Pair
from specheads.replay.cost import Costs, RoundTimes
from specheads.replay.replay import rounds_by_length
from specheads.sampling import Warp
from specheads.storage.journal import Journal

logger = logging.getLogger(__name__)

RoundNumbers = list[float]  # see round_numbers


@dataclass(frozen=True)
class Setting:
    """One row of the sweep; `rule` is None for the target alone.

    `family` is `target`, a family of candidates, `own` (the stopping rule that belongs to the verification rule), or the name of
    another verification rule, by which fixed lengths are judged.
    """

    name: str
    family: str
    value: float | None
    rule: StoppingRule | None
    verification: VerificationRule | None = None  # None: the sweep's own
    search: tuple[int, int] | None = None  # of MJGD, which has no draft either: block and beams
    head: str | None = None  # the name of the head that the rule asks

    @property
    def kind(self) -> str:
        """What decides the rule's own cost: its class, the head that it asks, and another verification rule."""
        return kind_of(self.rule, self.head) + (f" under {self.verification.label}" if self.verification else "")


TARGET_ALONE = Setting("target alone", "target", 0, None)


@dataclass
class Measured:
    """What one setting did: per prompt its totals over repeats, and all of its rounds."""

    setting: Setting
    stats: list[DecodeStats] = field(default_factory=list)
    rounds: list[list[RoundNumbers]] = field(default_factory=list)

    @property
    def token_seconds(self) -> np.ndarray:
        """The seconds that each emitted token took: its round's, shared among the round's tokens."""
        tokens, _, _, *seconds = np.array([numbers for prompt in self.rounds for numbers in prompt]).T
        return np.repeat(sum(seconds) / tokens, tokens.astype(int))

    def predicted_seconds(self, costs: Costs) -> np.ndarray:
        """Return the seconds (P,) that costs predict of each prompt's rounds."""
        drafted = [[int(numbers[1]) for numbers in prompt] for prompt in self.rounds]
        prompt = np.repeat(np.arange(len(drafted)), [len(one) for one in drafted])
        rounds = rounds_by_length(prompt, np.concatenate(drafted).astype(int), len(drafted))
        return costs.seconds(np.array([part.num_draft_calls for part in self.stats]), rounds)


def kinds_of(measured: Sequence[Measured]) -> dict[str, bool]:
    """Return the kinds of rules that were decoded, and whether each is a fixed length under the sweep's own verification rule."""
    drafting = [one.setting for one in measured if one.setting.rule is not None]
    return {one.kind: one.family == FIXED and one.verification is None for one in drafting}


def round_times(measured: Sequence[Measured]) -> RoundTimes:
    """Return what the rounds of all settings that draft took; those of the target alone say nothing about a round's costs.

    Responses to the same prompt have numbers of the same parity, so that both halves of the responses have every setting.
    """
    kinds = {kind: number for number, kind in enumerate(kinds_of(measured))}
    drafting = [one for one in measured if one.setting.rule is not None]
    most = 2 * max(len(one.rounds) for one in drafting)
    prompts = [
        (kinds[one.setting.kind], number * most + place, prompt)
        for number, one in enumerate(drafting)
        for place, prompt in enumerate(one.rounds)
    ]
    rows = np.array([numbers for *_, prompt in prompts for numbers in prompt])
    _, drafted, draft_calls, draft_seconds, target_seconds = rows.T
    lengths = [len(prompt) for *_, prompt in prompts]
    rule, response = (np.repeat(column, lengths) for column in list(zip(*prompts, strict=True))[:2])
    return RoundTimes(draft_calls.astype(int), drafted.astype(int), draft_seconds, target_seconds, rule, response)


def sweep_settings(
    candidates: Sequence[Candidate],
    own: StoppingRule | None = None,
    others: Mapping[str, VerificationRule] | None = None,
) -> list[Setting]:
    """Return the target alone, every candidate that can decode, the verification rule's `own` stopping rule, and fixed lengths under
    `others`.
    """
    settings = [TARGET_ALONE]
    settings += [Setting(one.name, one.family, one.value, one.live, head=one.head) for one in candidates if one.live is not None]
    if own is not None:
        settings.append(Setting(own.compile_key.replace("_", " "), "own", 0, own))
    for name, rule in (others or {}).items():
        lossy = "" if rule.lossless else ", lossy"
        fixed = [one for one in candidates if one.family == FIXED]
        settings += [Setting(f"{name} K={one.value}{lossy}", name, one.value, one.live, rule) for one in fixed]
    return settings


def run_sweep(
    pair: Pair,
    settings: Sequence[Setting],
    prompts: Sequence[Sequence[int]],
    warp: Warp,
    max_new_tokens: int,
    repeats: int,
    seed: int,
    engine: str = "auto",
    drafting: Drafting | None = None,
    verification: VerificationRule | None = None,
    on_generation: Callable[[int], None] = lambda count: None,
    journal: Journal | None = None,
    window: int | None = None,
) -> list[Measured]:
    """Decode every prompt `repeats` times with every setting; return what each setting did.

    Each (prompt, repeat) has a seed of its own, the same for all settings. The order of settings rotates from prompt to
    prompt and from repeat to repeat. Every setting decodes one prompt first that is not counted. `on_generation` is called
    with the number of responses that are done. Prompts that are in the `journal` are not decoded again. `window` is the memory's
    positions, enough for every prompt and its response; compiled steps depend on it, so sweeps with the same one share them.
    """
    window = window or min(pair.window, max(map(len, prompts)) + max_new_tokens)
    rules = [one.rule for one in settings if one.rule is not None]
    longest = max(rules, key=lambda rule: rule.max_tokens, default=None)  # all share memory that is large enough for it
    decoder = SpeculativeDecoder(pair, drafting, longest, verification, warp, engine, window)
    decoders = _decoders(decoder, settings, engine, window)
    logger.info("the engine was ready after %.1f s, which no figure contains", sum(one.warm_up() for one in decoders))

    def run(index: int, prompt: Sequence[int], seed: int) -> Generation:
        return decoders[index].generate(prompt, max_new_tokens, seed)

    for index in range(len(settings)):
        run(index, prompts[0], seed)
    measured = [Measured(setting) for setting in settings]
    done = {} if journal is None else journal.entries
    on_generation(len(done) * repeats * len(settings))
    for number, prompt in enumerate(prompts):
        if number in done:
            parts = [[DecodeStats(**one) for one in part] for part in done[number]["stats"]]
            rounds = done[number]["rounds"]
        else:
            parts, rounds = [[] for _ in settings], [[] for _ in settings]
            for repeat in range(repeats):
                own_seed = int(np.random.SeedSequence([seed, number, repeat]).generate_state(1)[0])
                for turn in range(len(settings)):
                    index = (turn + number + repeat) % len(settings)
                    generation = run(index, prompt, own_seed)
                    parts[index].append(generation.stats)
                    rounds[index] += [round_numbers(one) for one in generation.rounds]
                    on_generation(1)
            if journal is not None:
                stats = [[asdict(one) for one in part] for part in parts]
                journal.add(number, {"stats": stats, "rounds": rounds})
        for entry, found, numbers in zip(measured, parts, rounds, strict=True):
            entry.stats.append(DecodeStats.total(found))
            entry.rounds.append(numbers)
    return measured


def _decoders(
    decoder: SpeculativeDecoder, settings: Sequence[Setting], engine: str, window: int
) -> list[SpeculativeDecoder | Baseline | BlockSearch]:
    """Return one decoder per setting; all but searches share the memory of `decoder`."""
    baseline = Baseline(decoder.pair, decoder.warp, decoder.target_engine)

    def of(one: Setting) -> SpeculativeDecoder | Baseline | BlockSearch:
        if one.search is not None:
            return BlockSearch(decoder.pair, *one.search, warp=decoder.warp, engine=engine, window=window)
        return baseline if one.rule is None else decoder.with_stopping(one.rule, one.verification)

    return [of(one) for one in settings]


def round_numbers(one: Round) -> RoundNumbers:
    """Return what is kept of a round: tokens, drafted tokens, draft forwards, seconds of drafting and of what follows."""
    return [len(one.tokens), one.num_drafted, one.num_draft_calls, one.draft_seconds, one.verify_seconds + one.commit_seconds]
