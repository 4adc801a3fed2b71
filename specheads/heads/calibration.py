"""Calibration by index: the chance of acceptance that a head's logit stands for at each index of a
round, by logistics.

A round reaches its token number j (from 0) only if all before it were accepted, so a logit means
more at a later index.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

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


class Indices(NamedTuple):
    """The indices that tokens can have in rounds, (n,) long each: each token is a sample of all
    from its nearest to its furthest.
    """

    nearest: Tensor
    furthest: Tensor

    @classmethod
    def up_to(cls, furthest: Tensor) -> "Indices":
        return cls(torch.zeros_like(furthest), furthest)

    def limited(self, num_indices: int) -> "Indices":
        """Return what counts of them: the last index is also that of all later tokens."""
        return Indices(*(each.clamp_max(num_indices - 1) for each in self))

    def pairs(self, num_indices: int = NUM_INDICES) -> tuple[Tensor, Tensor]:
        """Return every pair of a token and an index that it can have: numbers and indices, (pairs,)
        long each.
        """
        nearest, furthest = self.limited(num_indices)
        index = torch.arange(num_indices, device=nearest.device)
        can_have = (nearest[:, None] <= index) & (index <= furthest[:, None])
        token, index = can_have.nonzero(as_tuple=True)
        return token, index


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
        indices: Indices,
        num_indices: int = NUM_INDICES,
        intercepts: bool = True,
        prior: float = PRIOR_SAMPLES,
    ) -> "IndexCalibration":
        """Return the calibration that best fits tokens.

        `accepted` (n,) is whether each token was accepted.

        Args:
            indices: those that each token can have. With `num_indices=1` it counts as often.
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
        nearest, furthest = indices.limited(num_indices if num_indices > 1 else NUM_INDICES)
        fitted = []
        for index in range(num_indices):
            at_index = (
                ((nearest <= index) & (index <= furthest)).double()
                if num_indices > 1
                else 1 + (furthest - nearest).double()
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
