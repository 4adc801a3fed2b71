"""A probe: record some prompts, time the steps, predict what each way to decode is worth, and say what to do."""

import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.step_times import LONGEST, TARGET, StepTimes, step_times
from specheads.decoding.stopping import MAX_TOKENS, FixedLength, HeadThreshold, Logistic, StoppingRule
from specheads.errors import UserError
from specheads.evaluation.intervals import Interval, halves, interval, resample_counts
from specheads.evaluation.probe.prediction import (
    BETTER,
    FIXED_NAME,
    HEAD,
    LOGISTIC,
    MORE_OVERLAP,
    PLAIN,
    Option,
    Overheads,
    agreement,
    best_length,
    predict,
)
from specheads.evaluation.probe.timing import LiveCheck, live_check, served_times
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.replayed_sets import RecordedSet, Recorder
from specheads.evaluation.settings import EngineName, Evaluation
from specheads.evaluation.setup import versions
from specheads.evaluation.speculation_profile import survival
from specheads.evaluation.sweep import LARGEST_SPREAD
from specheads.heads.config import HeadConfig
from specheads.heads.head import AcceptanceHead
from specheads.integrations.served_target import ServedModel
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import EncodedPrompt, encode_prompts, groups_of, unique
from specheads.replay.response_tree import RecordSettings
from specheads.settings import Built, PositiveCount, PositiveNumber, Seed, Settings, Text, setting


class Probe(Settings):
    """How much of a pair is looked at; the defaults take about five minutes for the embedded pairs, and cold compilation."""

    seed: Seed = setting(0, "seed of everything that is sampled")
    warp: Built[Warp] = setting(Warp(top_k=50), "how draft and target turn logits into probabilities")
    engine: EngineName = setting("auto", "how models are run while steps are timed: auto, eager, compiled, cuda_graph")
    prompts: Text | None = setting(
        None, "a file of prompts, with the templates of data= (for a pair of your own, data=alpaca); null: dev prompts of data="
    )
    num_prompts: PositiveCount = setting(48, "prompts to record; half of them choose for the others")
    num_live_prompts: PositiveCount = setting(4, "prompts to decode as a check")
    context: PositiveCount = setting(256, "positions in memory while steps are timed")
    repeats: PositiveCount = setting(40, "times that each step is timed")
    num_samples: PositiveCount = setting(4, "acceptance samples of each response; more make smaller errors")
    max_new_tokens: PositiveCount = setting(512, "longest response, in tokens", config="${data.max_new_tokens}")

    remote_url: Text | None = setting(
        None, "the address of a vLLM server that runs the target, for example http://localhost:8000", key="remote.url"
    )
    remote_model: Text | None = setting(None, "the server's name of the target; null: its first model", key="remote.model")
    remote_ratio: PositiveNumber | None = setting(
        None, "draft steps that a step of the target takes there; null: the ratio of their parameters", key="remote.ratio"
    )
    remote_requests: PositiveCount = setting(16, "requests that the server gets at the same time", key="remote.requests")


logger = logging.getLogger(__name__)
LARGEST_ERROR = 1.25  # of a prediction, next to a few prompts decoded
REMEDY = "probe again on a quiet machine, or with more repeats (repeats=, num_live_prompts=)"
SURVIVAL = 8  # places in a draft whose acceptance is reported


# Of speed, what a more complicated way to decode must gain over the simpler one. Decoded next to predicted gains of the embedded
# pairs (docs/measurements/archive.md): rules and heads 2 to 6 % less.
NOTICEABLE, WORTH_A_RULE, WORTH_TRAINING, WORTH_DISTILLING = 0.01, 0.05, 0.05, 0.05


@dataclass(frozen=True)
class Answer:
    """The recommended way to decode, its speed-up, a sentence that says so, and the command that comes next."""

    choice: str
    speedup: Interval
    text: str
    command: str


CommandLine = Callable[..., str]  # of a verb and its words


def answer_of(options: Sequence[Option], command_line: CommandLine) -> Answer:
    """Return the answer that options give; `command_line` writes the command that comes next, with the pair."""
    known = {option.name: option for option in options}
    chosen, better = known[PLAIN], known[BETTER]
    ladder = [(known[FIXED_NAME], NOTICEABLE), (known[LOGISTIC], WORTH_A_RULE)]
    heads = [option for option in options if option.width is not None]
    ladder += [(max(heads, key=lambda option: option.speedup.value), WORTH_TRAINING)] if heads else []
    for option, least in ladder:
        if option.speedup.value > chosen.speedup.value * (1 + least):
            chosen = option
    evaluate = ("evaluate", "head=null")
    said, following = {
        PLAIN: ("Do not speculate with this draft", evaluate),
        FIXED_NAME: (f"Draft a fixed number of tokens ({chosen.value})", evaluate),
        LOGISTIC: (f"Stop by a logistic ({chosen.value})", (*evaluate, "stopping=[fixed_length,logistic]")),
    }.get(chosen.name, (f"Train a head ({chosen.width} wide)", ("train", f"head.width={chosen.width}")))
    text = f"{said}: {_times(chosen.speedup)} the speed of the target alone"
    if chosen.name not in (PLAIN, FIXED_NAME):
        gain = chosen.gain
        text += f", {gain.value - 1:+.1%} [{gain.low - 1:+.1%}, {gain.high - 1:+.1%}] over the best fixed length"
    if better.gain.value > 1 + WORTH_DISTILLING and better.speedup.value > chosen.speedup.value:
        text += f". A draft with {MORE_OVERLAP:.0%} more overlap would bring {_times(better.speedup)} by itself: distil it first"
        following = ("distill",)
    return Answer(chosen.name, chosen.speedup, f"{text}.", command_line(*following))


def _times(speedup: Interval) -> str:
    return f"{speedup.value:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"


@dataclass(frozen=True)
class Probed:
    """What a probe found; `context` says how."""

    pair: str
    num_prompts: int
    num_tokens: int  # of the responses
    overlap: Interval  # the expected acceptance of a drafted token
    unknown: float | None  # the target's mean probability of tokens that the draft does not know; None: it knows all
    survival: Sequence[float]  # the chance that at least 1, 2, ... tokens of a draft are accepted
    times: StepTimes
    live: LiveCheck | None  # None where a server runs the target
    options: Sequence[Option]
    answer: Answer
    doubts: Sequence[str]  # why the times are not to be trusted; empty if they are
    not_measured: Sequence[str]  # what had to be assumed
    context: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, as in probe.json."""
        live = None if self.live is None else {**asdict(self.live), "speedup": self.live.speedup}
        return {**asdict(self), "ratio": self.times.costs.ratio, "live": live}


def probe(
    pair: Pair,
    settings: Probe,
    data: PromptData,
    data_folder: Path,
    command_line: CommandLine = lambda *words: shlex.join(["specheads", *words]),
    context: Mapping[str, Any] | None = None,
) -> Probed:
    """Return what speculation would be worth for a pair on prompts like those of `data`.

    Args:
        data_folder: where recordings are kept, which a second probe or an evaluation of the same prompts reads again.
        command_line: writes the command that comes next, from a verb and its words besides the pair.
        context: more that the result shall say of itself.

    Raises:
        UserError: too few prompts.
    """
    prompts = _prompts(pair, settings, data)
    logger.info("probe: %d prompts; recording their responses, then timing steps", len(prompts))
    recorded = _recorded(pair, settings, data, data_folder, prompts)
    agreed = [agreement(pair, half.recording, settings.warp) for half in recorded]
    left_out = [each for half in agreed for each in half.left_out]
    times, live, not_measured = _timed(pair, settings, recorded, prompts, left_out)
    options = predict(recorded, times, settings.warp.greedy, Overheads() if live is None else live.overheads)
    overlaps = [each for half in agreed for each in half.overlaps]
    resamples = resample_counts([group for half in recorded for group in half.groups or ()])
    sums, lengths = np.array([[each.sum(), len(each)] for each in overlaps]).T
    survived = np.mean([survival(half.recording, SURVIVAL) for half in recorded], axis=0)
    return Probed(
        pair=pair.name or f"{pair.draft_id} for {pair.target_id}",
        num_prompts=len(prompts),
        num_tokens=int(lengths.sum()),
        overlap=interval((resamples @ sums) / (resamples @ lengths)),
        unknown=None if pair.known_to_draft is None else _mean([each for half in agreed for each in half.unknown]),
        survival=survived.round(4).tolist(),
        times=times,
        live=live,
        options=options,
        answer=answer_of(options, command_line),
        doubts=[*doubts_of(times, live, options)],
        not_measured=not_measured,
        context={"warp": asdict(settings.warp), "versions": versions(), **(context or {})},
    )


def _timed(
    pair: Pair,
    settings: Probe,
    recorded: Sequence[RecordedSet],
    prompts: Sequence[EncodedPrompt],
    left_out: Sequence[np.ndarray],
) -> tuple[StepTimes, LiveCheck | None, list[str]]:
    """Return the times of steps, what decoding some prompts took, and what could not be measured."""
    positions = min(settings.context, pair.window // 2)
    lm, widths = pair.target_lm, _widths(pair.draft_lm.hidden_size)
    if isinstance(lm, ServedModel):
        target, draft = (sum(each.numel() for each in model.parameters()) for model in (pair.target, pair.draft))
        ratio = settings.remote_ratio or target / draft
        logger.info("probe: timing steps of the target on the server at %s", lm.server.url)
        times = served_times(lm, ratio, (LOGISTIC, f"{HEAD}{widths[0]}"), positions, settings.repeats)
        return times, None, not_known(settings, ratio, _mean(left_out))
    logger.info("probe: timing draft steps, verifications and heads of width %s", ", ".join(map(str, widths)))
    decoder = SpeculativeDecoder(pair, stopping=FixedLength(LONGEST), warp=settings.warp, engine=settings.engine)
    times = step_times(decoder, _timed_rules(pair, widths), positions, settings.repeats)
    ids = [ids for _, ids in prompts[: settings.num_live_prompts]]
    logger.info("probe: decoding %d prompts as a check", len(ids))
    how = {name: getattr(settings, name) for name in ("warp", "max_new_tokens", "engine", "seed")}
    return times, live_check(pair, ids, times.costs, best_length(recorded, times), Evaluation(**how)), []


def _mean(numbers: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(numbers).mean())


def not_known(settings: Probe, ratio: float, left_out: float) -> list[str]:
    """Return what a probe of a target on a server has to assume; `left_out`: the probability of tokens that it did not name."""
    source = "as remote.ratio says" if settings.remote_ratio else "by their numbers of parameters; remote.ratio= sets it"
    lines = [
        f"A draft step on the server is taken as 1/{ratio:.1f} of a step of the target, {source}.",
        "A head and a logistic count as free there, and nothing was decoded as a check.",
    ]
    if not settings.warp.greedy and not settings.warp.top_k:
        lines.append(f"The server does not name tokens of {left_out:.2%} of the target's probability; they count as impossible.")
    return lines


def doubts_of(times: StepTimes, live: LiveCheck | None, options: Sequence[Option]) -> Iterator[str]:
    """Yield the reasons why times, and the predictions from them, are not to be trusted; none if they are."""
    spread = times.costs.spread[TARGET]
    if spread > LARGEST_SPREAD:
        what = f"a step of the target took {spread:.2f} times its median on average"
        yield f"The machine was busy: {what}, normally at most {LARGEST_SPREAD}; {REMEDY}."
    predicted = next(option.speedup.value for option in options if option.name == FIXED_NAME)
    if live is not None and not 1 / LARGEST_ERROR < predicted / live.speedup < LARGEST_ERROR:
        yield (
            f"The best fixed length is predicted to be {predicted:.2f} times as fast as the target alone, but K={live.length} "
            f"was {live.speedup:.2f} times as fast when {live.num_prompts} prompts were decoded; {REMEDY}."
        )


def _timed_rules(pair: Pair, widths: Sequence[int]) -> dict[str, StoppingRule]:
    """Return by name a logistic of the draft's confidence, and heads of random weights of some widths."""
    rules: dict[str, StoppingRule] = {LOGISTIC: Logistic({"logit_max_prob": 1.0, "bias": 0.0}, 1.0, max_tokens=LONGEST)}
    for width in widths:
        config = HeadConfig(pair.draft_lm.hidden_size, width=width, vocab_size=pair.vocab_size)
        head = AcceptanceHead(config).to(pair.draft_lm.device).requires_grad_(False).eval()
        rules[f"{HEAD}{width}"] = HeadThreshold(head, 1.0, max_tokens=LONGEST)
    return rules


def _widths(hidden_size: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(max(8, hidden_size // part) for part in (16, 8, 1)))


def _prompts(pair: Pair, settings: Probe, data: PromptData) -> list[EncodedPrompt]:
    """Return the first dev prompts that leave room for a response; test prompts where there are no dev prompts."""
    loaded = unique(data.source.load(pair.chats))
    of_split = [prompt for prompt in loaded if prompt.split == "dev"] or [each for each in loaded if each.split == "test"]
    prompts = encode_prompts(pair, of_split, data.limits)[: settings.num_prompts]
    if len(prompts) < 2:
        raise UserError(
            f"there are {len(prompts)} dev prompts of at most {data.limits.max_prompt_tokens} tokens, and a probe needs 2; set "
            "num_prompts, data.num_dev or data.max_prompt_tokens, or use a data set with more rows."
        )
    return prompts


def _recorded(pair: Pair, settings: Probe, data: PromptData, folder: Path, prompts: Sequence[EncodedPrompt]) -> list[RecordedSet]:
    """Return the recordings of the two halves of the prompts."""
    limits = replace(data.limits, max_new_tokens=settings.max_new_tokens)
    # A server reads every rejected branch as a text from its beginning, so there is one sample.
    samples = 1 if isinstance(pair.target_lm, ServedModel) else settings.num_samples
    amounts = RecordSettings(samples, MAX_TOKENS, limits.batch_size)
    recorder = Recorder(pair, settings.warp, limits, amounts, settings.seed, folder)
    groups = groups_of([prompt for prompt, _ in prompts])
    first = halves(groups)
    parts = {name: np.flatnonzero(half).tolist() for name, half in (("first", first), ("second", ~first))}
    sets = {name: [prompts[number] for number in part] for name, part in parts.items()}
    return [
        RecordedSet(name, "dev", recording, groups=[groups[number] for number in parts[name]])
        for name, recording in recorder.record(sets, [], ground_truth=True).items()
    ]
