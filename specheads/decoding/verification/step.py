"""What follows the target's forward over a draft: warp, verification rule, and all that the host has to know in one tensor."""

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from specheads.decoding.engine import ForwardOutput
from specheads.decoding.records import Verdict
from specheads.sampling import Warp


class VerificationRule(Protocol):
    """What decides how much of a chain stands."""

    lossless: bool  # whether what comes out follows the target's law
    label: str  # what reports call it
    program: Hashable  # rules of equal programs decide alike

    def __call__(
        self,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        draws: Tensor,
        next_draw: Tensor,
        lengths: Tensor | None = None,
    ) -> Verdict:
        """Judge chains; arguments as in `token_verdict`."""


NUM_FACTS = 4  # number accepted, next token, NaN in the draft's law, NaN in the target's


class VerifyStep:
    """Tensors in, tensors out: an engine may compile it."""

    def __init__(self, warp: Warp, rule: VerificationRule, most: int) -> None:
        """`most`: rows of the memory that drafts come in."""
        self.warp, self.rule = warp, rule
        self.program = (VerifyStep, warp, rule.program, most)

    def __call__(self, output: ForwardOutput, draft_probs: Tensor, draws: Tensor, next_draw: Tensor, lengths: Tensor) -> Tensor:
        """Return NUM_FACTS numbers and the drafted tokens (NUM_FACTS + K,) long, of a forward over the last token and K drafted.

        Args:
            draft_probs, draws: memory for `most` >= K rows, (most, V) and (most,); what is beyond the length of a draft does not matter.
            next_draw: (1,), for the target's own token.
            lengths: (1,) long, the tokens that were drafted.
        """
        draft_tokens, target_probs = output.tokens[:, 1:], self.warp(output.logits)
        num_drafted = draft_tokens.shape[1]
        draft_probs, draws = draft_probs[None, :num_drafted], draws[None, :num_drafted]
        verdict = self.rule(draft_tokens, draft_probs, target_probs, draws, next_draw, lengths)
        drafted = torch.arange(num_drafted, device=lengths.device) < lengths[:, None]
        nans = [(draft_probs.isnan().any(dim=-1) & drafted).any(dim=1).long(), target_probs.isnan().any().reshape(1).long()]
        return torch.cat([verdict.num_accepted, verdict.next_token, *nans, draft_tokens[0]])
