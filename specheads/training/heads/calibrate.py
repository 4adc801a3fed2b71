"""Calibration of trained heads on dev prompts, which they were not trained on, recorded as an
evaluation records them.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specheads.errors import UserError
from specheads.forecast import Forecast
from specheads.heads.calibration import FORMS, IndexCalibration, in_rounds
from specheads.heads.head import AcceptanceHead, load_head
from specheads.heads.head_folder import store_in_config
from specheads.heads.metrics import calibration
from specheads.heads.train_prompts import TrainPrompts, text_hash
from specheads.prompts.prompt import EncodedPrompt, Prompt, encode_prompts, groups_of
from specheads.replay.head_scores import record_sets
from specheads.replay.information import Information, information
from specheads.replay.intervals import Groups, halves, interval, resample_counts
from specheads.replay.recording import Recorder
from specheads.replay.replay import head_logits, recorded_head

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibrated:
    """How well a head's predictions fit the tokens of rounds on dev prompts: `raw`, `before` and
    `cross_fitted`.

    `before` is with the calibration that the head had, if any, `cross_fitted` with the best form of
    FORMS, see `compared`.
    """

    ece: Mapping[str, float]
    log_loss: Mapping[str, float]  # nats
    best: str  # the form of the lowest cross-fitted log loss
    used: bool  # whether the head got it: it is clearly better than what the head had


def calibrate(
    num_prompts: int, recorder: Recorder, prompts: Sequence[Prompt], folders: Sequence[Path]
) -> tuple[dict[str, Calibrated], Information | None]:
    """Calibrate every head in `folders` on dev prompts where that helps, and write the calibration
    into the head's config.

    It helps if the best form's cross-fitted log loss is lower, with 95 % confidence over groups of
    prompts, and its calibration error too. Return by head what was found, and what the heads know
    about acceptance on these prompts.
    """
    heads = {folder: load_head(folder) for folder in folders}
    chosen = calibration_prompts(num_prompts, recorder, prompts, list(heads.values()))
    groups = groups_of(prompt for prompt, _ in chosen)
    title = folders[0].name if len(folders) == 1 else f"{len(folders)} heads"
    logger.info("calibrating %s on %d dev prompts", title, len(chosen))
    recording = record_sets(recorder, {"dev": chosen}, list(heads.values()), ground_truth=True)[
        "dev"
    ]
    found: dict[str, Calibrated] = {}
    forecast = Forecast("calibrating heads")
    for number, (folder, head) in enumerate(heads.items()):
        forecast.update(number, len(heads))
        logits, accepted, furthest, node = head_logits(recording, recorded_head(head))
        earlier = head.config.calibration
        result = compared(logits, accepted, furthest, recording.prompt_of(node), groups, earlier)
        found[folder.name] = result
        if earlier is not None and not result.used:
            continue
        if (learned := head.train_prompts) is not None:
            replace(learned, dev=TrainPrompts.of(prompt.text for prompt, _ in chosen).train).write(
                folder
            )
        trained = dict(head.config.train) | {
            "dev_ece": dict(result.ece),
            "dev_log_loss": dict(result.log_loss),
        }
        fitted = (
            IndexCalibration.fit(logits, accepted, furthest, *FORMS[result.best]).to_dict()
            if result.used
            else None
        )
        recommended = (
            None if result.used else head.config.recommended
        )  # a threshold for other predictions
        store_in_config(folder, calibration=fitted, recommended=recommended, train=trained)
    named = {folder.name: recorded_head(head) for folder, head in heads.items()}
    return found, information([recording], named, groups)


def compared(
    logits: Tensor,
    accepted: Tensor,
    furthest: Tensor,
    prompt: Tensor,
    groups: Groups,
    earlier: Mapping[str, Any] | None = None,
) -> Calibrated:
    """Return how the forms of a calibration compare with the predictions as they are, or with an
    `earlier` calibration.

    On the prompts that it was fitted on, a calibration looks better than it is, so each half of the
    prompts gets that of the other. The calibration error of each half is computed separately,
    because their calibrations err in opposite directions; that makes it a little larger, which
    favours the head as it is.

    `logits`, `accepted`, `furthest` are (n,) as in `IndexCalibration.fit`, `prompt` (n,) has the
    number of each token's prompt.
    """
    token, index = in_rounds(furthest)
    labels = accepted[token].double()
    owner = prompt[token]
    first = torch.from_numpy(halves(groups)).to(prompt.device)
    made = {"raw": logits[token]}
    if earlier is not None:
        made["before"] = IndexCalibration.from_dict(earlier)(logits[token], index)
    now = list(made)[-1]
    for form in FORMS:
        made[form] = torch.empty_like(made["raw"])
        for half in (first, ~first):
            there = ~half[prompt]
            fitted = IndexCalibration.fit(
                logits[there], accepted[there], furthest[there], *FORMS[form]
            )
            here = half[owner]
            made[form][here] = fitted(logits[token[here]], index[here])
    losses = {
        name: binary_cross_entropy_with_logits(each, labels, reduction="none")
        for name, each in made.items()
    }
    best = min(FORMS, key=lambda form: losses[form].mean().item())
    eces = {
        name: _ece(made[name], labels, [torch.ones_like(labels, dtype=torch.bool)])
        for name in made
        if name not in FORMS
    }
    eces["cross_fitted"] = _ece(made[best], labels, [first[owner], ~first[owner]])
    resamples = resample_counts(groups)
    sums = torch.zeros(resamples.shape[1], 2, dtype=torch.float64)
    sums.index_add_(
        0, owner, torch.stack([losses[now] - losses[best], torch.ones_like(labels)], dim=1)
    )
    gained, counted = (resamples @ sums.numpy()).T
    used = interval(gained / counted.clip(1)).low > 0 and eces["cross_fitted"] < eces[now]
    log_loss = {
        name: losses[best if name == "cross_fitted" else name].mean().item() for name in eces
    }
    return Calibrated(eces, log_loss, best, used)


def _ece(logits: Tensor, labels: Tensor, parts: Sequence[Tensor]) -> float:
    """Return the mean expected calibration error of parts of tokens (n,) bool, each weighted by its
    tokens.
    """
    errors = [
        (part.sum().item(), calibration(torch.sigmoid(logits[part]), labels[part]).ece)
        for part in parts
    ]
    return sum(count * error for count, error in errors) / max(1, len(labels))


def calibration_prompts(
    num_prompts: int, recorder: Recorder, prompts: Sequence[Prompt], heads: Sequence[AcceptanceHead]
) -> list[EncodedPrompt]:
    """Return the first `num_prompts` dev prompts that no head learned from.

    Raises UserError if there are none.
    """
    learned = {
        number
        for head in heads
        if head.train_prompts is not None
        for number in head.train_prompts.train.tolist()
    }
    dev = [prompt for prompt in prompts if prompt.split == "dev"]
    unknown = [prompt for prompt in dev if text_hash(prompt.text) not in learned]
    if not unknown:
        raise UserError(
            "calibration needs dev prompts that heads did not learn from, but there are none among"
            f" {len(dev)}; set data.num_dev, or give another data set; specheads train leaves heads"
            " uncalibrated with calibration=null."
        )
    return encode_prompts(recorder.pair, unknown, recorder.limits)[:num_prompts]
