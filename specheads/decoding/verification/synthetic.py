"""Acceptance at a given rate whatever the models say: to time an engine, never to write text."""

import torch
from torch import Tensor

from specheads.decoding.records import Verdict
from specheads.errors import UserError, is_number
from specheads.sampling import sample


class SyntheticVerification:
    """`verification=synthetic`: each drafted token is accepted with probability `rate` up to the first rejection.

    The output is not the target's; whatever reports its figures says so.
    """

    lossless = False

    def __init__(self, rate: float = 0.8) -> None:
        if not is_number(rate) or not 0 <= rate <= 1:
            raise UserError(f"verification.rate={rate} is outside [0, 1]; it is the chance that a drafted token is accepted.")
        self.rate = rate
        self.program = ("synthetic", rate)

    @property
    def label(self) -> str:
        return f"synthetic acceptance at rate {self.rate:g}"

    def __call__(
        self,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        draws: Tensor,
        next_draw: Tensor,
        lengths: Tensor | None = None,
    ) -> Verdict:
        """Judge chains; arguments as in `token_verdict`, of which the laws of the draft do not matter."""
        batch, num_drafted = draft_tokens.shape
        within = torch.arange(num_drafted, device=draws.device) < (num_drafted if lengths is None else lengths[:, None])
        num_accepted = ((draws < self.rate) & within).long().cumprod(dim=1).sum(dim=1)
        next_probs = target_probs[torch.arange(batch, device=draws.device), num_accepted]
        return Verdict(num_accepted=num_accepted, next_token=sample(next_probs, next_draw))
