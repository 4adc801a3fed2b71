"""What follows the target's forward over a draft: warp, verification rule, and all that the host has to know in one tensor."""

import torch
from torch import Tensor

from specheads.decoding.engine import ForwardOutput
from specheads.decoding.verification.token import TokenVerification
from specheads.sampling import Warp

NUM_FACTS = 4  # number accepted, next token, NaN in the draft's law, NaN in the target's


class VerifyStep:
    """Tensors in, tensors out: an engine may compile it."""

    def __init__(self, warp: Warp, rule: TokenVerification) -> None:
        self.warp, self.rule = warp, rule

    def __call__(
        self, output: ForwardOutput, draft_tokens: Tensor, draft_probs: Tensor, draws: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return NUM_FACTS numbers and the drafted tokens (NUM_FACTS + K,) long.

        Args:
            draft_tokens, draft_probs: (1, K) and (1, K, V); what is beyond the length of a draft does not matter.
            draws: (K + 1,), the last one for the target's own token.
            lengths: (1,) long, the tokens that were drafted.
        """
        target_probs = self.warp(output.logits)
        verdict = self.rule(draft_tokens, draft_probs, target_probs, draws[None, :-1], draws[-1:], lengths)
        nans = [probs.isnan().any().reshape(1).long() for probs in (draft_probs, target_probs)]
        return torch.cat([verdict.num_accepted, verdict.next_token, *nans, draft_tokens[0]])
