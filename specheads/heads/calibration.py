"""Calibration by index: the chance of acceptance that a head's logit stands for at each index of a
round, by logistics.

A round reaches its token number j (from 0) only if all before it were accepted, so a logit means
more at a later index.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from specheads.heads.config import check_calibration
from specheads.heads.metrics import fit_logistic

NUM_INDICES = 8  # the last stands for all later ones: few rounds get that far
# Forms of a calibration by name: the number of indices that it tells apart, and whether it has
# intercepts.
FORMS = {
    "temperature": (1, False),
    "Platt": (1, True),
    "temperatures by index": (NUM_INDICES, False),
    "Platt by index": (NUM_INDICES, True),
}
# Large, because samples of one response share their logits; on nano 300 to 3000 give the same
# results
PRIOR_SAMPLES = 1000.0


@dataclass(frozen=True)
class IndexCalibration:
    """`slope[j] x logit + intercept[j]` is the calibrated logit of token j of a round.

    Later tokens use the last pair.
    """

    slope: list[float]
    intercept: list[float]

    @classmethod
    def neutral(cls) -> "IndexCalibration":
        return cls([1.0], [0.0])

    @classmethod
    def fit(
        cls,
        logits: Tensor,
        accepted: Tensor,
        furthest: Tensor,
        num_indices: int = NUM_INDICES,
        intercepts: bool = True,
        prior: float = PRIOR_SAMPLES,
    ) -> "IndexCalibration":
        """Return the calibration that best fits tokens.

        `accepted` (n,) is whether each token was accepted.

        Args:
            furthest: the largest index that each token can have in a round, (n,) long; the token is
                a sample of all indices up to it. With `num_indices=1` it counts as often.
            intercepts: without them there are slopes alone, inverse temperatures.
            prior: a positive number, the weight in samples of two assumptions: that an index is
                like all tokens, and that the head is right about all tokens. Source: Platt 1999,
                with power priors (Ibrahim and Chen 2000).
        """
        if not len(logits):
            return cls.neutral()
        labels = accepted.double()
        inputs = logits.double()
        share = prior / len(logits)
        prior_labels = (labels + share * torch.sigmoid(inputs)) / (1 + share)
        fitted = []
        for index in range(num_indices):
            at_index = (
                (furthest >= index).double()
                if num_indices > 1
                else 1 + furthest.clamp_max(NUM_INDICES - 1).double()
            )
            weights = at_index + share
            outcomes = (at_index * labels + share * prior_labels) / weights
            fitted.append(fit_logistic(inputs[:, None], outcomes, weights, intercept=intercepts))
        return cls(*torch.stack(fitted).T.tolist())

    def rows(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return slopes and intercepts, (count, indices) each in the heads' float32.

        All rows share memory.
        """
        values = torch.tensor([self.slope, self.intercept], dtype=torch.float32, device=device)
        slope, intercept = values[:, None].expand(-1, count, -1)
        return slope, intercept

    def __call__(self, logits: Tensor, index: Tensor) -> Tensor:
        return calibrated(logits, index, *self.rows(len(logits), logits.device))

    def to_dict(self) -> dict[str, list[float]]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> "IndexCalibration":
        """Read the result of `to_dict`; None means no calibration.

        Raises UserError for anything else.
        """
        if values is None:
            return cls.neutral()
        check_calibration(values)
        return cls(list(values["slope"]), list(values["intercept"]))


def calibrated(logits: Tensor, index: Tensor, slope: Tensor, intercept: Tensor) -> Tensor:
    """Return calibrated logits (B,), each with the entries of `slope` and `intercept` (B, indices)
    at its `index` (B,).
    """
    place = index.clamp(0, slope.shape[1] - 1)[:, None]
    return slope.gather(1, place).squeeze(1) * logits + intercept.gather(1, place).squeeze(1)


def in_rounds(furthest: Tensor, num_indices: int = NUM_INDICES) -> tuple[Tensor, Tensor]:
    """Return every pair of a token and an index up to its `furthest` (n,) in a round: numbers and
    indices, (pairs,) long each.
    """
    token, index = (torch.arange(num_indices, device=furthest.device) <= furthest[:, None]).nonzero(
        as_tuple=True
    )
    return token, index
