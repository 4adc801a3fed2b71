"""Decode the same prompts with many settings, interleaved, so that a slow minute of the machine falls on all of them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from specheads.decoding.decoder import Baseline, SpeculativeDecoder
from specheads.decoding.drafting import Autoregressive
from specheads.decoding.records import DecodeStats, Generation
from specheads.decoding.stopping import FixedLength, HeadThreshold, StoppingRule
from specheads.decoding.verification import VerificationRule
from specheads.evaluation.journal import Journal
from specheads.heads.head import AcceptanceHead
from specheads.pair import Pair
from specheads.sampling import Warp

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """One row of the sweep; `rule` is None for the target alone.

    `family` is `target`, `fixed`, `head`, `own` (the stopping rule that belongs to the verification rule), or the name of another
    verification rule, by which fixed lengths are judged.
    """

    name: str
    family: str
    value: float
    rule: StoppingRule | None
    verification: VerificationRule | None = None  # None: the sweep's own


@dataclass
class Measured:
    """What one setting did: per prompt its totals over repeats, and every emitted token's seconds."""

    setting: Setting
    stats: list[DecodeStats] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)


def sweep_settings(
    fixed_lengths: Sequence[int],
    head: AcceptanceHead | None,
    thresholds: Sequence[float],
    own: StoppingRule | None = None,
    others: Mapping[str, VerificationRule] | None = None,
) -> list[Setting]:
    """Return the target alone, every fixed length, every threshold of the head, the verification rule's `own` stopping rule, and
    every fixed length under `others`.
    """
    settings = [Setting("target alone", "target", 0, None)]
    settings += [Setting(f"fixed K={k}", "fixed", k, FixedLength(k)) for k in fixed_lengths]
    if head is not None:
        settings += [Setting(f"head {t:g}", "head", t, HeadThreshold(head, t)) for t in thresholds]
    if own is not None:
        settings.append(Setting(own.program.replace("_", " "), "own", 0, own))
    for name, rule in (others or {}).items():
        lossy = "" if rule.lossless else ", lossy"
        settings += [Setting(f"{name} K={k}{lossy}", name, k, FixedLength(k), rule) for k in fixed_lengths]
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
    drafting: Autoregressive | None = None,
    verification: VerificationRule | None = None,
    on_generation: Callable[[int], None] = lambda count: None,
    journal: Journal | None = None,
) -> list[Measured]:
    """Decode every prompt `repeats` times with every setting; return what each setting did.

    Each (prompt, repeat) has a seed of its own, the same for all settings. The order of settings rotates from prompt to
    prompt and from repeat to repeat. Every setting decodes one prompt first that is not counted. `on_generation` is called
    with the number of responses that are done. Prompts that are in the `journal` are not decoded again.
    """
    window = min(pair.window, max(map(len, prompts)) + max_new_tokens)
    decoder = SpeculativeDecoder(pair, drafting, verification=verification, warp=warp, engine=engine, window=window)
    decoders = _decoders(decoder, settings)
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
            seconds = done[number]["token_seconds"]
        else:
            parts, seconds = [[] for _ in settings], [[] for _ in settings]
            for repeat in range(repeats):
                own_seed = int(np.random.SeedSequence([seed, number, repeat]).generate_state(1)[0])
                for turn in range(len(settings)):
                    index = (turn + number + repeat) % len(settings)
                    generation = run(index, prompt, own_seed)
                    parts[index].append(generation.stats)
                    seconds[index] += token_seconds(generation)
                    on_generation(1)
            if journal is not None:
                stats = [[asdict(one) for one in part] for part in parts]
                journal.add(number, {"stats": stats, "token_seconds": seconds})
        for entry, found, times in zip(measured, parts, seconds, strict=True):
            entry.stats.append(DecodeStats.total(found))
            entry.token_seconds += times
    return measured


def _decoders(decoder: SpeculativeDecoder, settings: Sequence[Setting]) -> list[SpeculativeDecoder | Baseline]:
    """Return one decoder per setting; all share the memory of `decoder`."""
    baseline = Baseline(decoder.pair, decoder.warp, decoder.target_engine)
    return [baseline if one.rule is None else decoder.with_stopping(one.rule, one.verification) for one in settings]


def token_seconds(generation: Generation) -> list[float]:
    """Return the seconds each emitted token took: its round's, shared among the round's tokens."""
    return [r.seconds / len(r.tokens) for r in generation.rounds for _ in r.tokens]
