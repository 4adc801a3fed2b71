"""A probe: record some prompts, time the steps, predict what each way to decode is worth, and say
what to do. It is an evaluation without trained heads: heads of random weights are timed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from specheads.decoding.records import DecodeStats
from specheads.decoding.step_times import StepTimes
from specheads.decoding.stopping import HeadThreshold
from specheads.errors import UserError
from specheads.evaluation.candidates import CostTable, RuleChoice, fixed_length, step_kind
from specheads.evaluation.costs import OVERHEAD_LENGTH, measured_costs, timed_text
from specheads.evaluation.probe import prediction
from specheads.evaluation.probe.prediction import (
    RULES,
    CommandLine,
    LiveCheck,
    Option,
    Recommendation,
    groups_of_halves,
    head_name,
    speed_of,
)
from specheads.evaluation.probe.settings import Probe
from specheads.evaluation.prompt_sets import PromptData, PromptSet
from specheads.evaluation.replayed_sets import RecordedSet, counts_of, recorded_text
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup, versions
from specheads.evaluation.sweep import Measured, doubts_of_machine
from specheads.heads.config import HeadConfig
from specheads.heads.head import AcceptanceHead, LocatedHead
from specheads.heads.train_prompts import TrainPrompts
from specheads.pair.pair import Pair
from specheads.progress import progress, stage
from specheads.replay.head_scores import record_sets
from specheads.replay.information import Information, information
from specheads.replay.intervals import Interval, halves, interval, resample_counts
from specheads.replay.response_tree import RecordSettings


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
    heads: Mapping[int, float]  # seconds that a head adds to a draft step, by width
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
    folders: tuple[Path, Path],
    command_line: CommandLine,
    context: Mapping[str, object],
) -> Probed:
    """Return what speculation would be worth for a pair on prompts like those of `data`.

    Raises UserError for too few prompts.

    Args:
        folders: the folder of recordings, which a second probe or an evaluation of the same prompts
            reads again, and the folder of this run.
        command_line: writes the command that comes next, from a verb and its words besides the
            pair.
        context: more that the result shall say of itself.
    """
    settings = settings.for_pair(pair)
    hidden_size = pair.draft_lm.hidden_size
    widths = sorted({max(8, hidden_size // 16), max(8, hidden_size // 8), hidden_size})
    random_heads = {head_name(width): _random_head(pair, width) for width in widths}
    setup = Setup(pair, random_heads, _as_evaluation(settings), data, *folders)
    prompts = setup.prompts.dev.first(settings.num_prompts)
    if len(prompts.prompts) < 2:
        raise UserError(
            f"there are {len(prompts.prompts)} dev prompts of at most"
            f" {data.limits.max_prompt_tokens} tokens, and a probe needs 2; set num_prompts,"
            " data.num_dev or data.max_prompt_tokens, or use a data set with more rows."
        )
    overlaps = list[torch.Tensor]()
    unknown = list[torch.Tensor]()
    with stage("recording") as say:
        recorded = _recorded(setup, prompts)
        recordings = [half.recording for half in recorded]
        with progress("comparing distributions", len(prompts.prompts)) as advance:
            for recording in recordings:
                agreed, lost = prediction.agreement(pair, recording, settings.warp, advance)
                overlaps.append(agreed)
                unknown.append(lost)
        say(recorded_text(recordings))
    with stage("timing") as say:
        table, decoded = measured_costs(setup)
        say(timed_text(table))
    assert table.steps is not None
    times = table.steps.estimate
    heads = {}
    for width in widths:
        heads[width] = times.rules[step_kind(HeadThreshold, head_name(width))]
    live = _live_check(recorded, table, decoded)
    options = prediction.predict(recorded, table, heads, settings.warp.greedy)
    lengths = torch.cat([recording.lengths for recording in recordings])
    groups = groups_of_halves(recorded)
    return Probed(
        pair=pair.name or f"{pair.draft_id} for {pair.target_id}",
        num_prompts=len(prompts.prompts),
        num_tokens=int(lengths.sum()),
        overlap=_mean_overlap(torch.cat(overlaps), lengths, resample_counts(groups)),
        unknown=None if pair.draft_lm.lacking is None else torch.cat(unknown).mean().item(),
        information=information(recordings, {}, groups),
        times=times,
        heads=heads,
        live=live,
        options=options,
        answer=prediction.recommended(options, command_line),
        doubts=[*doubts_of_machine(decoded[0]), *prediction.doubts_of(live)],
        context={"warp": settings.warp.values(), "versions": versions(), **context},
    )


def _as_evaluation(settings: Probe) -> Evaluation:
    head = RuleChoice(HeadThreshold, {"threshold": 1.0})
    return Evaluation(
        warp=settings.warp,
        max_new_tokens=settings.max_new_tokens,
        engine=settings.engine,
        seed=settings.seed,
        timing_seconds=settings.timing_seconds,
        ratios=(),
        stopping={**RULES, "head_threshold": head},
    )


def _random_head(pair: Pair, width: int) -> LocatedHead:
    """Return a head of random weights, to be timed."""
    config = HeadConfig(pair.draft_lm.hidden_size, width=width, vocab_size=pair.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a resumed probe has the same heads
        head = AcceptanceHead(config).to(pair.draft_lm.device).requires_grad_(False).eval()
    head.train_prompts = TrainPrompts.of([])
    return LocatedHead(head, head_name(width))


def _recorded(setup: Setup, prompts: PromptSet) -> list[RecordedSet]:
    """Return the recordings of both halves of the prompts, which share no group."""
    recorder = setup.recorder(RecordSettings())
    first = halves(prompts.groups)
    sets = {}
    for name, here in (("first", first), ("second", ~first)):
        chosen = [prompts.prompts[number] for number in np.flatnonzero(here).tolist()]
        sets[name] = replace(prompts, prompts=chosen)
    named = {name: each.prompts for name, each in sets.items()}
    recorded = []
    for name, recording in record_sets(recorder, named, [], ground_truth=True).items():
        recorded.append(RecordedSet(name, "dev", recording, sets[name].groups))
    return recorded


def _live_check(
    recorded: Sequence[RecordedSet], table: CostTable, decoded: Sequence[Measured]
) -> LiveCheck:
    """Return what the few decoded prompts say, next to what is predicted for all of them."""
    alone, drafting = decoded
    rule = fixed_length(OVERHEAD_LENGTH)
    counted = [(rule, counts_of(half.recording, [rule])[0]) for half in recorded]
    once = np.ones((1, sum(half.recording.num_prompts for half in recorded)))
    return LiveCheck(
        len(alone.stats),
        OVERHEAD_LENGTH,
        DecodeStats.total(alone.stats).tokens_per_second,
        DecodeStats.total(drafting.stats).tokens_per_second,
        speed_of(counted, once, table).item(),
    )


def _mean_overlap(overlap: torch.Tensor, lengths: torch.Tensor, resamples: np.ndarray) -> Interval:
    """Return the mean of overlaps (N,) of responses of these lengths (P,), with its interval."""
    sums = np.array([prompt.sum().item() for prompt in overlap.split(lengths.tolist())])
    return interval((resamples @ sums) / (resamples @ lengths.numpy()))
