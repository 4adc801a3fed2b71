"""Calibration by index: what a head's logit is worth at each place of a round.

A round reaches its token number j (from 0) only if all before it were accepted, so the same logit is worth more at a later index.
Each index has a logistic of its own (Platt scaling), of which early ones have the most samples.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from specheads.errors import UserError, is_number
from specheads.heads.metrics import fit_logistic

NUM_INDICES = 8  # the last stands for all later ones: few rounds get that far
PRIOR_SAMPLES = 1000.0  # many, as draws of one response share their logits; on nano 300 to 3000 do as well


@dataclass(frozen=True)
class IndexCalibration:
    """`slope[j] x logit + intercept[j]` is the calibrated logit of token j of a round; the last pair serves all later tokens too."""

    slope: list[float]
    intercept: list[float]

    @classmethod
    def identity(cls) -> "IndexCalibration":
        return cls([1.0], [0.0])

    @classmethod
    def fit(
        cls, logits: Tensor, accepted: Tensor, furthest: Tensor, num_indices: int = NUM_INDICES, prior: float = PRIOR_SAMPLES
    ) -> "IndexCalibration":
        """Return what fits best to tokens that were accepted (n,) or not.

        Args:
            logits: (n,), or (n, num_indices) where they depend on the index.
            furthest: the largest index that each token can have in a round, (n,) long; it is a sample of all indices up to there.
            prior: above 0, how many samples a belief counts for: of an index, that it is as all tokens are; of all tokens, that
                the head is right. What has few samples stays close to it, and samples of one kind alone do no harm.

        Source: Platt 1999, with power priors (Ibrahim and Chen 2000): the logistic of an index is fitted to its own samples, and to
        all tokens at a weight that makes them count for `prior` samples.
        """
        if not len(logits):
            return cls.identity()
        labels, share = accepted.double(), prior / len(logits)
        fitted = []
        for index in range(num_indices):
            said = (logits if logits.dim() == 1 else logits[:, index]).double()
            believed = (labels + share * torch.sigmoid(said)) / (1 + share)
            own = (furthest >= index).double()
            weights = own + share
            fitted.append(fit_logistic(said[:, None], (own * labels + share * believed) / weights, weights))
        return cls(*torch.stack(fitted).T.tolist())

    def rows(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return slopes and intercepts, (count, indices) float32 each, as heads compute; all rows are the same memory."""
        values = torch.tensor([self.slope, self.intercept], dtype=torch.float32, device=device)
        return tuple(values[:, None].expand(-1, count, -1))

    def __call__(self, logits: Tensor, index: Tensor) -> Tensor:
        """Return calibrated logits (n,) of tokens that have an `index` (n,) long in their round."""
        return calibrated(logits, index, *self.rows(len(logits), logits.device))

    def to_dict(self) -> dict[str, list[float]]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None, where: str = "the head") -> "IndexCalibration":
        """Read what `to_dict` wrote, the identity for None; raises UserError for anything else."""
        if values is None:
            return cls.identity()
        known = isinstance(values, Mapping) and values.keys() == {"slope", "intercept"}
        if not known or not all(map(_are_numbers, values.values())) or len(values["slope"]) != len(values["intercept"]):
            raise UserError(
                f"{where} has the calibration {values!r}; expected slope and intercept, lists of finite numbers of one length, "
                "one for each index in a round. Export the head again, or write null to use it as it is."
            )
        return cls(list(values["slope"]), list(values["intercept"]))


def calibrated(logits: Tensor, index: Tensor, slope: Tensor, intercept: Tensor) -> Tensor:
    """Return calibrated logits (B,): each with that number of `slope` and `intercept` (B, indices) which its `index` (B,) names."""
    place = index.clamp(0, slope.shape[1] - 1)[:, None]
    return slope.gather(1, place).squeeze(1) * logits + intercept.gather(1, place).squeeze(1)


def in_rounds(furthest: Tensor, num_indices: int = NUM_INDICES) -> tuple[Tensor, Tensor]:
    """Return every pair of a token and an index that it can have in a round: numbers of tokens, and indices, (pairs,) long each.

    `furthest` (n,) is each token's largest index. The last of `num_indices` stands for all later ones.
    """
    return (torch.arange(num_indices, device=furthest.device) <= furthest[:, None]).nonzero(as_tuple=True)


def _are_numbers(values: object) -> bool:
    """Whether these are some finite numbers in a list."""
    return isinstance(values, list | tuple) and len(values) > 0 and all(is_number(x) and abs(x) < float("inf") for x in values)
