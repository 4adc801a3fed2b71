"""Predictions of acceptance for a batch: of each token before it is sampled, and again after it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specheads.decoding.load.admission import survival_of
from specheads.decoding.load.drafts import Drafts
from specheads.decoding.stopping.logistic import LOGISTIC_INPUTS, checked_weights
from specheads.errors import UserError
from specheads.features import FEATURES
from specheads.heads.calibration import IndexCalibration


class Predictor(Protocol):
    """A prediction of each token's acceptance, if all tokens before it are accepted."""

    @property
    def needs(self) -> frozenset[str]:
        """The features that it reads."""

    @property
    def reads_token(self) -> bool:
        """Whether it depends on the token itself."""

    def __call__(self, drafts: Drafts) -> np.ndarray:
        """Return the probability (R, K) that each token is accepted; places without a token are undefined."""


@dataclass(frozen=True)
class ReadOut:
    """Both predictions of acceptance: `before` a token is sampled, on which its submission may depend, and `after`.

    Raises:
        UserError: `before` reads the token.
    """

    before: Predictor
    after: Predictor

    def __post_init__(self) -> None:
        """Check that the first prediction does not know the token."""
        if self.before.reads_token:
            raise UserError(
                f"before={self.before} reads the token whose submission it decides, which would change the output distribution; "
                "use max_prob and entropy, or a head that predicts before the token is sampled."
            )

    @property
    def needs(self) -> frozenset[str]:
        """The features that both read."""
        return self.before.needs | self.after.needs

    def survival(self, drafts: Drafts) -> np.ndarray:
        """Return the survival (R, K) on which the submission of each token may depend; see `survival_of`."""
        return survival_of(self.after(drafts), self.before(drafts))


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

    @property
    def reads_token(self) -> bool:
        """Whether a feature of the token itself is among its inputs."""
        return any(FEATURES[name].of_token for name in self.needs)

    def __call__(self, drafts: Drafts) -> np.ndarray:
        logits = np.full((drafts.num_requests, drafts.longest), self.weights.get("bias", 0.0))
        for name, (source, transform) in LOGISTIC_INPUTS.items():
            if name in self.weights:
                logits += self.weights[name] * transform(drafts.features[source][:, : drafts.longest], np.log)
        return 1 / (1 + np.exp(-logits))


@dataclass(frozen=True)
class HeadAcceptance:
    """The calibrated prediction of a head, whose logits are the feature `name`.

    `reads_token`: of a look-ahead head true, because its inputs are known once the token was sampled; of a head that predicts the
    overlap of the distribution that the token is sampled from, false.
    """

    name: str
    calibration: IndexCalibration
    reads_token: bool = True

    @property
    def needs(self) -> frozenset[str]:
        """The features that it reads."""
        return frozenset({self.name})

    def __call__(self, drafts: Drafts) -> np.ndarray:
        slope, intercept = (np.array(values) for values in (self.calibration.slope, self.calibration.intercept))
        entry = np.minimum(np.arange(drafts.longest), len(slope) - 1)
        logits = drafts.features[self.name][:, : drafts.longest]
        return 1 / (1 + np.exp(-(slope[entry] * logits + intercept[entry])))
