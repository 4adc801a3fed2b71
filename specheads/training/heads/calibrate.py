"""Calibration of trained heads on dev prompts, which they were not trained on, recorded as an evaluation records them."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specheads.errors import UserError
from specheads.evaluation.head_folders import store_dev_prompts, store_in_config
from specheads.evaluation.intervals import Groups, halves
from specheads.evaluation.replayed_sets import record_sets
from specheads.forecast import Forecast
from specheads.heads.calibration import IndexCalibration, in_rounds
from specheads.heads.head import AcceptanceHead, load_head
from specheads.heads.metrics import calibration
from specheads.heads.train_prompts import text_hash
from specheads.prompts.prompt import EncodedPrompt, Prompt, encode_prompts, groups_of
from specheads.replay.recording import Recorder
from specheads.replay.replay import head_logits, recorded_head

logger = logging.getLogger(__name__)


def calibrate(
    num_prompts: int, recorder: Recorder, prompts: Sequence[Prompt], folders: Sequence[Path]
) -> dict[str, dict[str, float]]:
    """Fit a calibration for every head in `folders` on dev prompts, and write it into the head's config.

    A head keeps a calibration that it has if its error here is no larger than that of one from other prompts; `is_kept` tells. If
    it is replaced, a threshold that was recommended for other predictions is taken out of the config.

    Returns the expected calibration errors of each head on the dev prompts, by its name: `raw`, without a calibration, `before`,
    with the one that it had, if any, and `cross_fitted`, with a calibration that was fitted on other dev prompts (see
    `cross_fitted_error`). The `train` section of the config has them too.
    """
    heads = {folder: load_head(folder) for folder in folders}
    chosen = calibration_prompts(num_prompts, recorder, prompts, list(heads.values()))
    groups = groups_of(prompt for prompt, _ in chosen)
    title = folders[0].name if len(folders) == 1 else f"{len(folders)} heads"
    logger.info("calibrating %s on %d dev prompts", title, len(chosen))
    recording = record_sets(recorder, {"dev": chosen}, list(heads.values()), ground_truth=False)["dev"]
    errors: dict[str, dict[str, float]] = {}
    forecast = Forecast("calibrating heads")
    for number, (folder, head) in enumerate(heads.items()):
        forecast.update(number, len(heads))
        recorded, earlier = recorded_head(head), head.config.calibration
        logits, accepted, furthest, node = head_logits(recording, recorded)
        tokens, prompt = (logits, accepted, furthest), recording.prompt_of(node)
        errors[folder.name] = {
            **({} if earlier is None else {"before": error_in_rounds(IndexCalibration.from_dict(earlier), *tokens)}),
            "raw": error_in_rounds(IndexCalibration.neutral(), *tokens),
            "cross_fitted": cross_fitted_error(*tokens, prompt, groups),
        }
        if is_kept(errors[folder.name]):
            continue
        store_dev_prompts(folder, head, [prompt.text for prompt, _ in chosen])
        fitted = IndexCalibration.fit(*tokens).to_dict()
        trained = dict(head.config.train) | {"dev_ece": errors[folder.name]}
        store_in_config(folder, calibration=fitted, recommended=None, train=trained)
    return errors


def is_kept(errors: Mapping[str, float]) -> bool:
    """Return whether a head keeps its calibration, from its errors (see `calibrate`)."""
    return "before" in errors and errors["before"] <= errors["cross_fitted"]


def calibration_prompts(
    num_prompts: int, recorder: Recorder, prompts: Sequence[Prompt], heads: Sequence[AcceptanceHead]
) -> list[EncodedPrompt]:
    """Return the first `num_prompts` dev prompts that no head learned from; raises UserError if there are none."""
    learned = {number for head in heads if head.train_prompts is not None for number in head.train_prompts.train.tolist()}
    dev = [prompt for prompt in prompts if prompt.split == "dev"]
    unknown = [prompt for prompt in dev if text_hash(prompt.text) not in learned]
    if not unknown:
        raise UserError(
            f"calibration needs dev prompts that heads did not learn from, but there are none among {len(dev)}; set "
            "data.num_dev, or give another data set; specheads train leaves heads uncalibrated with calibration=null."
        )
    return encode_prompts(recorder.pair, unknown, recorder.limits)[:num_prompts]


def cross_fitted_error(logits: Tensor, accepted: Tensor, furthest: Tensor, prompt: Tensor, groups: Groups) -> float:
    """Return the expected calibration error of calibrations of one half of the prompts on the other: the mean over both halves.

    On the prompts that it was fitted on, a calibration looks better than it is. The error of each half is computed separately,
    because the calibrations of the halves err in opposite directions.

    Args:
        logits, accepted, furthest: (n,) of drafted tokens, see `IndexCalibration.fit`.
        prompt: (n,) long, the number of each token's prompt.
        groups: the group of each prompt; prompts of one group are in the same half.
    """
    total, first = 0.0, torch.from_numpy(halves(groups)).to(prompt.device)[prompt]
    for half in (first, ~first):
        fitted = IndexCalibration.fit(logits[~half], accepted[~half], furthest[~half])
        here = logits[half], accepted[half], furthest[half]
        total += len(in_rounds(here[2])[0]) * error_in_rounds(fitted, *here)
    return total / max(1, len(in_rounds(furthest)[0]))


def error_in_rounds(fitted: IndexCalibration, logits: Tensor, accepted: Tensor, furthest: Tensor) -> float:
    """Return the expected calibration error of drafted tokens, each counted at every index that it can have in a round."""
    token, index = in_rounds(furthest)
    return calibration(torch.sigmoid(fitted(logits[token], index)), accepted[token].double()).ece
