"""Which calibration fits a head's recorded predictions best, on prompts that it was not fitted
on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specheads.heads.calibration import FORMS, IndexCalibration, Indices
from specheads.heads.metrics import calibration_error
from specheads.replay.intervals import Groups, halves, interval, resample_counts


@dataclass(frozen=True)
class Calibrated:
    """How well a head's predictions fit the tokens of rounds on dev prompts.

    Errors are of the uncalibrated predictions (`raw`), with the calibration that the head had
    (`before`), if any, and with the best one of FORMS (`cross_fitted`), see `compared`.
    """

    ece: Mapping[str, float]
    log_loss: Mapping[str, float]  # nats
    best: str  # the form of the lowest cross-fitted log loss
    used: bool  # whether it is clearly better than what the head had


def compared(
    logits: Tensor,
    accepted: Tensor,
    indices: Indices,
    prompt: Tensor,
    groups: Groups,
    earlier: IndexCalibration | None = None,
) -> Calibrated:
    """Return how the forms of a calibration compare with the uncalibrated predictions, or with an
    `earlier` calibration.

    On the prompts that it was fitted on, a calibration looks better than it is, so each half of the
    prompts gets that of the other. The calibration error of each half is computed separately,
    because their calibrations err in opposite directions; that makes it a little larger, which
    favours the head without a new one.

    `logits`, `accepted`, `indices` are (n,) as in `IndexCalibration.fit`, `prompt` (n,) has the
    number of each token's prompt.
    """
    token, index = indices.pairs()
    labels = accepted[token].double()
    owner = prompt[token]
    first = torch.from_numpy(halves(groups)).to(prompt.device)
    predictions = {"raw": logits[token]}
    now = "raw"
    if earlier is not None:
        now = "before"
        predictions[now] = earlier(logits[token], index)
    losses = {}
    for name, values in predictions.items():
        losses[name] = binary_cross_entropy_with_logits(values, labels, reduction="none")
    eces = {}
    for name, values in predictions.items():
        eces[name] = calibration_error(values, labels)
    best = ""
    for form, (num_indices, intercepts) in FORMS.items():
        values = torch.empty_like(predictions["raw"])
        for half in (first, ~first):
            other = ~half[prompt]
            given = logits[other], accepted[other], Indices(*(each[other] for each in indices))
            fitted = IndexCalibration.fit(*given, num_indices, intercepts)
            here = half[owner]
            values[here] = fitted(logits[token[here]], index[here])
        loss = binary_cross_entropy_with_logits(values, labels, reduction="none")
        if not best or loss.mean().item() < losses["cross_fitted"].mean().item():
            best = form
            losses["cross_fitted"] = loss
            predictions["cross_fitted"] = values
    eces["cross_fitted"] = calibration_error(predictions["cross_fitted"], labels, first[owner])
    gain = losses[now] - losses["cross_fitted"]
    resamples = resample_counts(groups)
    sums = torch.zeros(resamples.shape[1], 2, dtype=torch.float64)
    sums.index_add_(0, owner, torch.stack([gain, torch.ones_like(labels)], dim=1))
    gained, counted = (resamples @ sums.numpy()).T
    used = interval(gained / counted.clip(1)).low > 0 and eces["cross_fitted"] < eces[now]
    log_loss = {name: loss.mean().item() for name, loss in losses.items()}
    return Calibrated(eces, log_loss, best, used)
