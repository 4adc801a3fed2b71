"""Recordings of sets of prompts with what heads say of them: made once, found again by every command that asks for the same."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from specheads.forecast import progress
from specheads.heads.head import AcceptanceHead
from specheads.pair import Pair
from specheads.prompts.encoding import EncodedPrompt, ResponseLimits
from specheads.replay.head_scores import head_fingerprint, judge
from specheads.replay.recording import GROUND_TRUTH, Recording, load_recording, make_recording
from specheads.replay.response_tree import RecordSettings
from specheads.sampling import Warp


def recorded(
    cfg: DictConfig,
    pair: Pair,
    sets: Mapping[str, Sequence[EncodedPrompt]],
    generation: ResponseLimits,
    settings: RecordSettings,
    heads: Sequence[AcceptanceHead],
    ground_truth: bool,
) -> dict[str, Recording]:
    """Return the recording of each set of prompts, judged by `heads` in one pass and, if `truth`, by the target."""
    judges, total = {head_fingerprint(head): head for head in heads}, sum(map(len, sets.values()))
    folders = {}
    with progress("recording", total) as advance:
        for name, prompts in sets.items():
            folders[name] = make_recording(
                pair, prompts, Warp(**cfg.warp), generation, settings, cfg.seed, Path(cfg.paths.data), advance
            )
    with progress("judging", (bool(judges) + bool(ground_truth)) * total) as advance:
        for folder in folders.values():
            judge(folder, pair, judges, ground_truth, advance)
    names = [*judges, *([GROUND_TRUTH] if ground_truth else [])]
    return {name: load_recording(folder, names) for name, folder in folders.items()}
