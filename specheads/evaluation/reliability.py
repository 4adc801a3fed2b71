"""How well heads, and the draft's probabilities, predict whether a drafted token is accepted."""

from collections.abc import Mapping

import torch

from specheads.evaluation.report import Reliability
from specheads.heads.calibration import IndexCalibration, in_rounds
from specheads.heads.metrics import auroc, calibration, ece_by_index
from specheads.replay.recording import Recording
from specheads.replay.replay import RecordedHead, head_logits


def reliability(recording: Recording, heads: Mapping[str, RecordedHead]) -> list[Reliability]:
    """Return how well heads and the draft's probabilities predict acceptance, at every index that a token can have in a round.

    A calibrated head has two rows: with its raw predictions and with the calibrated ones that rules use.
    """
    rows = []
    for name, head in heads.items():
        raw, calibrated, labels, index = logits_in_rounds(recording, head)
        rows.append(_reliability(name, torch.sigmoid(raw), labels, index))
        if head.config.calibration is not None:
            rows.append(_reliability(f"{name}, calibrated", torch.sigmoid(calibrated), labels, index))
    node, _, accepted, furthest = recording.labels()
    token, index = in_rounds(furthest)
    for name, feature in {"draft probability": "draft_prob", "largest probability": "max_prob"}.items():
        rows.append(_reliability(name, recording.features[feature][node[token]].double(), accepted[token].double(), index))
    return rows


def logits_in_rounds(recording: Recording, head: RecordedHead) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a head's predictions for every drafted token at every index that the token can have in a round.

    Returns, (n,) each: raw logits; calibrated logits, which rules use; whether the token was accepted, 0 or 1; and the index.
    """
    logits, accepted, furthest = head_logits(recording, head)
    token, index = in_rounds(furthest)
    raw = logits[token, index]
    return raw, IndexCalibration.from_dict(head.config.calibration)(raw, index), accepted[token].double(), index


def _reliability(name: str, probs: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> Reliability:
    curve = calibration(probs, labels)
    return Reliability(
        predictor=name,
        share=curve.share.tolist(),
        predicted=curve.predicted.tolist(),
        observed=curve.observed.tolist(),
        ece=curve.ece,
        ece_by_index=ece_by_index(probs, labels, index),
        auroc=auroc(probs, labels),
    )
