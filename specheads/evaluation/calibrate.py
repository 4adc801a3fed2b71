"""Calibrate trained heads on dev prompts, which they were not trained on, recorded as an evaluation records them."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from data_gen.__main__ import generation_settings
from specheads.decoding.stopping import MAX_TOKENS
from specheads.evaluation.find import prompts_of, store_dev_prompts, store_in_config
from specheads.evaluation.offline import logits_in_rounds
from specheads.evaluation.recorded import recorded
from specheads.heads.calibration import IndexCalibration
from specheads.heads.checkpoint import load_head
from specheads.heads.metrics import calibration
from specheads.pair import Pair
from specheads.replay.record import RecordSettings
from specheads.replay.replay import head_logits, recorded_head

logger = logging.getLogger(__name__)


def calibrate(cfg: DictConfig, pair: Pair, folders: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Fit a calibration for every head in `folders` and write it into its config.

    Returns by name of a head its expected calibration errors on the dev prompts, before (`raw`) and after (`calibrated`); they are
    in its config's `train` too.
    """
    heads = {folder: load_head(folder) for folder in folders}
    prompts = prompts_of(cfg, pair, "dev", cfg.calibration.num_prompts)
    what = folders[0].name if len(folders) == 1 else f"{len(folders)} heads"
    logger.info("calibrating %s on %d dev prompts", what, len(prompts))
    settings = RecordSettings(cfg.calibration.num_draws, MAX_TOKENS, cfg.calibration.get("batch_size", cfg.generation.batch_size))
    found = recorded(cfg, pair, {"dev": prompts}, generation_settings(cfg), settings, list(heads.values()), truth=False)
    errors = {}
    for folder, head in heads.items():
        fitted = IndexCalibration.fit(*head_logits(found["dev"], recorded_head(head))).to_dict()
        head.config = replace(head.config, calibration=fitted)
        raw, heard, labels, _ = logits_in_rounds(found["dev"], recorded_head(head))
        own = {name: calibration(torch.sigmoid(logits), labels).ece for name, logits in (("raw", raw), ("calibrated", heard))}
        store_dev_prompts(folder, head, [prompt.prompt_id for prompt, _ in prompts])
        store_in_config(folder, calibration=fitted, train=dict(head.config.train) | {"dev_ece": own})
        errors[folder.name] = own
    return errors
