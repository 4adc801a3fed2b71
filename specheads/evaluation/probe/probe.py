"""A probe: record some prompts, time the steps, predict what each way to decode is worth, and say
what to do.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.records import DecodeStats
from specheads.decoding.request import checked_window
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import CONTEXT, LONGEST, StepTimes, TimedSteps, time_steps
from specheads.decoding.stopping import FixedLength, HeadThreshold, Logistic, StoppingRule
from specheads.errors import UserError
from specheads.evaluation.candidates import TARGET_ALONE, fixed_length
from specheads.evaluation.probe import prediction
from specheads.evaluation.probe.prediction import (
    LOGISTIC_STEP,
    CommandLine,
    LiveCheck,
    Option,
    Recommendation,
    head_name,
)
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.replayed_sets import RecordedSet
from specheads.evaluation.settings import EngineName, Evaluation
from specheads.evaluation.setup import versions
from specheads.evaluation.sweep import Sweep, overheads_of
from specheads.forecast import progress
from specheads.heads.config import HeadConfig
from specheads.heads.head import AcceptanceHead
from specheads.pair.generation_config import Warped
from specheads.pair.pair import Pair
from specheads.prompts.prompt import EncodedPrompt, encode_prompts, groups_of, unique
from specheads.replay.head_scores import record_sets
from specheads.replay.information import Information, information
from specheads.replay.intervals import Groups, Interval, halves, interval, resample_counts
from specheads.replay.recording import Recorder, Recording
from specheads.replay.response_tree import RecordSettings
from specheads.settings import PositiveCount, Seed, Text, setting


class Probe(Warped):
    """How much of a pair is looked at.

    The defaults take about five minutes for the embedded pairs, and cold compilation.
    """

    seed: Seed = setting(0, "seed of everything that is sampled")
    engine: EngineName = setting(
        "auto", "how models are run while steps are timed: auto, eager, compiled, cuda_graph"
    )
    prompts: Text | None = setting(
        None,
        "a file of prompts, with the templates of data= (for a pair of your own, data=alpaca);"
        " null: dev prompts of data=",
    )
    num_prompts: PositiveCount = setting(
        48, "prompts to record; half of them choose for the others"
    )
    num_live_prompts: PositiveCount = setting(4, "prompts to decode as a check")
    repeats: PositiveCount = setting(40, "times that each step is timed")
    max_new_tokens: PositiveCount = setting(
        512, "longest response, in tokens", config="${data.max_new_tokens}"
    )


logger = logging.getLogger(__name__)


def live_check(
    pair: Pair, prompts: Sequence[Sequence[int]], costs: StepCosts, length: int, how: Evaluation
) -> LiveCheck:
    """Decode prompts (ids) with the target alone and with a fixed length, and return what it took,
    overheads by medians.
    """
    with progress("decoding", 2 * len(prompts)) as advance:
        # The KV cache of the steps that were timed, which are compiled
        sweep = Sweep(pair, how, checked_window(pair, None))
        settings = [TARGET_ALONE, fixed_length(length)]
        alone, drafting = sweep.run(settings, prompts, on_generation=advance)
    overheads = overheads_of(alone, drafting, costs)
    return LiveCheck(
        f"{len(prompts)} prompts",
        length,
        DecodeStats.total(alone.stats).tokens_per_second,
        DecodeStats.total(drafting.stats).tokens_per_second,
        overheads,
    )


@dataclass(frozen=True)
class Probed:
    """What a probe found; `context` says how."""

    pair: str
    num_prompts: int
    num_tokens: int  # tokens of the responses
    overlap: Interval  # the expected acceptance of a drafted token
    # The target's mean probability of tokens that the draft never proposes; None: it may propose
    # all
    unknown: float | None
    information: Information | None  # about the acceptance of a drafted token
    times: StepTimes
    live: LiveCheck
    options: Sequence[Option]
    answer: Recommendation
    doubts: Sequence[str]  # why the times are unreliable; empty if they are not
    context: Mapping[str, object]

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values, as in probe.json."""
        return {
            **asdict(self),
            "ratio": self.times.costs.ratio,
            "live": {**asdict(self.live), "speedup": self.live.speedup},
        }


def probe(
    pair: Pair,
    settings: Probe,
    data: PromptData,
    data_folder: Path,
    command_line: CommandLine,
    context: Mapping[str, object],
) -> Probed:
    """Return what speculation would be worth for a pair on prompts like those of `data`.

    Raises UserError for too few prompts.

    Args:
        data_folder: where recordings are kept, which a second probe or an evaluation of the same
            prompts reads again.
        command_line: writes the command that comes next, from a verb and its words besides the
            pair.
        context: more that the result shall say of itself.
    """
    settings = settings.for_pair(pair)
    prompts = _prompts(pair, settings, data)
    logger.info("probe: %d prompts; recording their responses, then timing steps", len(prompts))
    recorded = _recorded(pair, settings, data, data_folder, prompts)
    with progress("comparing distributions", len(prompts)) as advance:
        overlaps = list[torch.Tensor]()
        unknown = list[torch.Tensor]()
        for half in recorded:
            agreed, lost = prediction.agreement(pair, half.recording, settings.warp, advance)
            overlaps.append(agreed)
            unknown.append(lost)
    hidden_size = pair.draft_lm.hidden_size
    widths = sorted({max(8, hidden_size // 16), max(8, hidden_size // 8), hidden_size})
    times = _timed(pair, settings, widths)
    checked = [ids for _, ids in prompts[: settings.num_live_prompts]]
    logger.info("probe: decoding %d prompts as a check", len(checked))
    how = Evaluation(
        warp=settings.warp,
        max_new_tokens=settings.max_new_tokens,
        engine=settings.engine,
        seed=settings.seed,
    )
    length = prediction.best_length(recorded[0], times)
    live = live_check(pair, checked, times.costs, length, how)
    heads = {width: times.rules[head_name(width)] for width in widths}
    options = prediction.predict(recorded, times, heads, settings.warp.greedy, live.overheads)
    recordings = [half.recording for half in recorded]
    groups = list[Hashable]()
    for half in recorded:
        groups += half.groups
    return Probed(
        pair=pair.name or f"{pair.draft_id} for {pair.target_id}",
        num_prompts=len(prompts),
        num_tokens=sum(len(half) for half in overlaps),
        overlap=_mean_overlap(recordings, overlaps, groups),
        unknown=None if pair.draft_lm.lacking is None else torch.cat(unknown).mean().item(),
        information=information(recordings, {}, groups),
        times=times,
        live=live,
        options=options,
        answer=prediction.recommended(options, command_line),
        doubts=[*prediction.doubts_of(times, live, options)],
        context={"warp": settings.warp.values(), "versions": versions(), **context},
    )


def _mean_overlap(
    recordings: Sequence[Recording], overlaps: Sequence[torch.Tensor], groups: Groups
) -> Interval:
    """Return the mean of overlaps (N,) of each recording, with its interval over prompts."""
    lengths = torch.cat([recording.lengths for recording in recordings])
    by_prompt = torch.cat(list(overlaps)).split(lengths.tolist())
    sums = np.array([prompt.sum().item() for prompt in by_prompt])
    resamples = resample_counts(groups)
    return interval((resamples @ sums) / (resamples @ lengths.numpy()))


def _timed(pair: Pair, settings: Probe, widths: Sequence[int]) -> StepTimes:
    """Return the times of steps of both models, of a logistic and of heads of random weights."""
    logger.info(
        "probe: timing draft steps, verifications and heads of width %s",
        ", ".join(map(str, widths)),
    )
    decoder = SpeculativeDecoder(
        pair, stopping=FixedLength(LONGEST), warp=settings.warp, engine=settings.engine
    )
    with progress("timing steps", settings.repeats) as advance:
        rules = _timed_rules(pair, widths)
        positions = min(CONTEXT, pair.window // 2)
        seconds = time_steps(decoder, rules, positions, repeats=settings.repeats, advance=advance)
        return TimedSteps.of(seconds, list(rules)).estimate


def _timed_rules(pair: Pair, widths: Sequence[int]) -> dict[str, StoppingRule]:
    """Return by name a logistic of the draft's confidence, and heads of random weights of some
    widths.
    """
    rules: dict[str, StoppingRule] = {
        LOGISTIC_STEP: Logistic({"logit_max_prob": 1.0, "bias": 0.0}, 1.0, max_tokens=LONGEST)
    }
    for width in widths:
        config = HeadConfig(pair.draft_lm.hidden_size, width=width, vocab_size=pair.vocab_size)
        head = AcceptanceHead(config).to(pair.draft_lm.device).requires_grad_(False).eval()
        rules[head_name(width)] = HeadThreshold(head, 1.0, max_tokens=LONGEST)
    return rules


def _prompts(pair: Pair, settings: Probe, data: PromptData) -> list[EncodedPrompt]:
    """Return the first dev prompts that leave room for a response.

    Test prompts where there are no dev prompts.
    """
    loaded = unique(data.source.load(pair.chats))
    of_split = [prompt for prompt in loaded if prompt.split == "dev"]
    if not of_split:
        of_split = [prompt for prompt in loaded if prompt.split == "test"]
    prompts = encode_prompts(pair, of_split, data.limits)[: settings.num_prompts]
    if len(prompts) < 2:
        raise UserError(
            f"there are {len(prompts)} dev prompts of at most {data.limits.max_prompt_tokens}"
            " tokens, and a probe needs 2; set num_prompts, data.num_dev or"
            " data.max_prompt_tokens, or use a data set with more rows."
        )
    return prompts


def _recorded(
    pair: Pair, settings: Probe, data: PromptData, folder: Path, prompts: Sequence[EncodedPrompt]
) -> list[RecordedSet]:
    """Return the recordings of both halves of the prompts, which share no group."""
    limits = replace(data.limits, max_new_tokens=settings.max_new_tokens)
    recorder = Recorder(pair, settings.warp, limits, RecordSettings(), settings.seed, folder)
    groups = groups_of([prompt for prompt, _ in prompts])
    first = halves(groups)
    sets: dict[str, list[EncodedPrompt]] = {"first": [], "second": []}
    groups_of_sets: dict[str, list[Hashable]] = {"first": [], "second": []}
    for prompt, group, is_first in zip(prompts, groups, first, strict=True):
        name = "first" if is_first else "second"
        sets[name].append(prompt)
        groups_of_sets[name].append(group)
    recorded = []
    for name, recording in record_sets(recorder, sets, [], ground_truth=True).items():
        recorded.append(RecordedSet(name, "dev", recording, groups_of_sets[name]))
    return recorded
