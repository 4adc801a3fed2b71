"""Predictions of acceptance for a batch: of each token before it is sampled, and again after it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from specheads.decoding.load.admission import survival_of
from specheads.decoding.load.drafts import Drafts
from specheads.decoding.stopping.logistic import LOGISTIC_INPUTS, checked_weights, logistic_inputs
from specheads.errors import UserError
from specheads.heads.calibration import IndexCalibration

KNOWN_BEFORE = ("logit_max_prob", "max_prob", "entropy", "bias")  # inputs that do not depend on the token


class ReadOut(Protocol):
    """Both predictions, for every place of a batch's drafts; places without a token are undefined."""

    needs: frozenset[str]

    def overlap(self, drafts: Drafts) -> np.ndarray:
        """Return each token's acceptance (R, K) as predicted before it was sampled; it must not depend on the token."""

    def acceptance(self, drafts: Drafts) -> np.ndarray:
        """Return each token's acceptance (R, K) as predicted after it was sampled."""


def survival(read_out: ReadOut, drafts: Drafts) -> np.ndarray:
    """Return the survival (R, K) on which the submission of each token may depend; see `survival_of`."""
    return survival_of(read_out.acceptance(drafts), read_out.overlap(drafts))


@dataclass(frozen=True)
class LogisticAcceptance:
    """A logistic of the draft's confidence; `weights` of names in LOGISTIC_INPUTS, and `bias`."""

    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        """Check the weights and bring them into order."""
        object.__setattr__(self, "weights", checked_weights(self.weights))

    @property
    def needs(self) -> frozenset[str]:
        """The features that it reads."""
        return frozenset(LOGISTIC_INPUTS[name][0] for name in self.weights if name != "bias")

    def __call__(self, drafts: Drafts) -> np.ndarray:
        """Return the probability (R, K) that each token is accepted."""
        features = {name: torch.from_numpy(drafts.features[name][:, : drafts.longest]) for name in self.needs}
        inputs = logistic_inputs(list(self.weights), features)
        return (inputs @ torch.tensor(list(self.weights.values()), dtype=torch.float64)).sigmoid().numpy()


@dataclass(frozen=True)
class ConfidenceReadOut:
    """Both predictions without a head, by two logistics of the draft's confidence that were fitted on dev prompts.

    Raises:
        UserError: `before` reads the token.
    """

    before: LogisticAcceptance
    after: LogisticAcceptance

    def __post_init__(self) -> None:
        """Check that the first logistic does not know the token."""
        check_known_before(self.before)

    @property
    def needs(self) -> frozenset[str]:
        """The features that both read."""
        return self.before.needs | self.after.needs

    def overlap(self, drafts: Drafts) -> np.ndarray:
        return self.before(drafts)

    def acceptance(self, drafts: Drafts) -> np.ndarray:
        return self.after(drafts)


@dataclass(frozen=True)
class HeadReadOut:
    """A look-ahead head after a token was sampled, and a logistic of the draft's confidence before.

    `feature` is the name of the head's logits; those of token j are computed from inputs known once token j was sampled.

    Raises:
        UserError: `before` reads the token.
    """

    before: LogisticAcceptance
    feature: str
    calibration: IndexCalibration

    def __post_init__(self) -> None:
        """Check that the logistic does not know the token."""
        check_known_before(self.before)

    @property
    def needs(self) -> frozenset[str]:
        """The features that both read."""
        return self.before.needs | {self.feature}

    def overlap(self, drafts: Drafts) -> np.ndarray:
        return self.before(drafts)

    def acceptance(self, drafts: Drafts) -> np.ndarray:
        place = np.arange(drafts.longest)
        slope, intercept = (np.array(values) for values in (self.calibration.slope, self.calibration.intercept))
        entry = np.minimum(place, len(slope) - 1)
        logits = drafts.features[self.feature][:, : drafts.longest]
        return 1 / (1 + np.exp(-(slope[entry] * logits + intercept[entry])))


def check_known_before(logistic: LogisticAcceptance) -> None:
    """Raise UserError if a logistic reads a feature of the token itself, which would make its use for that token lossy."""
    if unknown := [name for name in logistic.weights if name not in KNOWN_BEFORE]:
        raise UserError(
            f"weights.{unknown[0]} is known only after a token was sampled, but `before` decides whether it is submitted; "
            f"use some of {', '.join(KNOWN_BEFORE)}."
        )
