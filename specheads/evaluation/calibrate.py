"""Calibrate trained heads on dev prompts, which they were not trained on, recorded as an evaluation records them."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor

from specheads.commands.evaluation import prompt_data
from specheads.decoding.stopping import MAX_TOKENS
from specheads.evaluation.head_folders import LocatedHead, store_dev_prompts, store_in_config
from specheads.evaluation.intervals import Groups, halves
from specheads.evaluation.prompt_sets import PromptSets
from specheads.evaluation.recordings import Recorder
from specheads.heads.calibration import IndexCalibration, in_rounds
from specheads.heads.checkpoint import load_head
from specheads.heads.metrics import calibration
from specheads.pair import Pair
from specheads.replay.replay import head_logits, predicted_nodes, recorded_head
from specheads.replay.response_tree import RecordSettings
from specheads.sampling import Warp

logger = logging.getLogger(__name__)


def calibrate(cfg: DictConfig, pair: Pair, folders: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Fit a calibration for every head in `folders` and write it into its config.

    Returns by name of a head its expected calibration errors on the dev prompts, without a calibration (`raw`) and with one of other
    dev prompts (`cross_fitted`, see `cross_fitted_error`); they are in its config's `train` too. The calibration in its config is
    fitted on all of them.
    """
    heads = {folder: load_head(folder) for folder in folders}
    named = {folder.name: LocatedHead(head, str(folder)) for folder, head in heads.items()}
    data = prompt_data(cfg)
    dev = PromptSets(data, pair, named).dev.first(cfg.calibration.num_prompts)
    what = folders[0].name if len(folders) == 1 else f"{len(folders)} heads"
    logger.info("calibrating %s on %d dev prompts", what, len(dev.prompts))
    settings = RecordSettings(
        cfg.calibration.num_samples, MAX_TOKENS, cfg.calibration.get("batch_size", cfg.generation.batch_size)
    )
    limits = data.limits.responses(cfg.data.max_new_tokens)
    recorder = Recorder(pair, Warp(**cfg.warp), limits, settings, cfg.seed, Path(cfg.paths.data))
    found = recorder.record({"dev": dev.prompts}, list(heads.values()), ground_truth=False)
    errors = {}
    for folder, head in heads.items():
        tokens = head_logits(found["dev"], recorded_head(head))
        prompt = found["dev"].prompt_of(predicted_nodes(found["dev"], recorded_head(head))[0])
        fitted = IndexCalibration.fit(*tokens).to_dict()
        head.config = replace(head.config, calibration=fitted)
        own = {
            "raw": error_in_rounds(IndexCalibration.identity(), *tokens),
            "cross_fitted": cross_fitted_error(*tokens, prompt, dev.groups),
        }
        store_dev_prompts(folder, head, [prompt.text for prompt, _ in dev.prompts])
        store_in_config(folder, calibration=fitted, train=dict(head.config.train) | {"dev_ece": own})
        errors[folder.name] = own
    return errors


def cross_fitted_error(logits: Tensor, accepted: Tensor, furthest: Tensor, prompt: Tensor, groups: Groups) -> float:
    """Return the expected calibration error of calibrations of one half of the prompts on the other: the mean over both halves.

    A calibration looks better than it is on the prompts that it was fitted on. The error is that of each half by itself, because the
    halves' calibrations err in opposite directions.

    Args:
        logits, accepted, furthest: (n, indices), (n,) and (n,) of drafted tokens, see `IndexCalibration.fit`.
        prompt: (n,) long, the number of each token's prompt.
        groups: that of each prompt, so that no half has prompts that resemble the other's.
    """
    total, first = 0.0, torch.from_numpy(halves(groups)).to(prompt.device)[prompt]
    for half in (first, ~first):
        here, there = ([part[side] for part in (logits, accepted, furthest)] for side in (half, ~half))
        total += len(in_rounds(here[2])[0]) * error_in_rounds(IndexCalibration.fit(*there), *here)
    return total / max(1, len(in_rounds(furthest)[0]))


def error_in_rounds(fitted: IndexCalibration, logits: Tensor, accepted: Tensor, furthest: Tensor) -> float:
    """Return the expected calibration error under a calibration of drafted tokens, each at every index that it can have in a round."""
    token, index = in_rounds(furthest)
    return calibration(torch.sigmoid(fitted(logits[token, index], index)), accepted[token].double()).ece
