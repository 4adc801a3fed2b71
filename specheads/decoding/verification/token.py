"""Token verification (Leviathan et al. 2023; Chen et al. 2023): each drafted token is tested on its own, in order.

Emits exactly the target's law whatever the draft proposes. With a point mass as the law (temperature 0) it is the
comparison of the drafted prefix with the target's argmax.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.records import Verdict
from specheads.sampling import accept_prob, sample, uniforms


@dataclass(frozen=True)
class TokenLaw:
    """The acceptance law of a drafted block: what randomness then decides."""

    pass_probs: Tensor  # (B, K), the chance that token i passes once all before it have; 0 beyond a row's length
    next_probs: Tensor  # (B, K + 1, V), unnormalised law of the next token after exactly i accepted ones


def token_law(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, lengths: Tensor | None = None) -> TokenLaw:
    """Return the law of `token_verification`; same arguments, no randomness."""
    batch, num_drafted = draft_tokens.shape
    index = draft_tokens.unsqueeze(-1)
    drafted = accept_prob(target_probs[:, :-1].gather(-1, index), draft_probs.gather(-1, index)).squeeze(-1)
    if lengths is None:
        lengths = torch.full((batch,), num_drafted, device=draft_tokens.device)
    within = torch.arange(num_drafted, device=draft_tokens.device) < lengths[:, None]
    residual = (target_probs[:, :-1] - draft_probs).clamp_min(0)
    # Past a row's last drafted token nothing was rejected, so the next token follows the target itself; so it does where
    # the two laws differ by rounding alone and the residual is empty.
    corrected = within[..., None] & (residual.sum(dim=-1, keepdim=True) > 0)
    next_probs = torch.cat([torch.where(corrected, residual, target_probs[:, :-1]), target_probs[:, -1:]], dim=1)
    return TokenLaw(pass_probs=torch.where(within, drafted, 0.0), next_probs=next_probs)


def token_verification(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    generator: torch.Generator,
    lengths: Tensor | None = None,
) -> Verdict:
    """Accept each drafted token with `min(1, t / d)` up to the first rejection, then draw one token of the target's.

    Args:
        draft_tokens: (B, K) long.
        draft_probs: (B, K, V), the warped law each was drawn from.
        target_probs: (B, K + 1, V), the target's warped law at each drafted position and after the last.
        generator: the only source of randomness, on the tensors' device.
        lengths: (B,) long, tokens drafted per row; default K.

    Source: Leviathan et al. 2023, algorithm 1.
    """
    batch, num_drafted = draft_tokens.shape
    draws = uniforms((batch, num_drafted + 1), generator)
    return token_verdict(draft_tokens, draft_probs, target_probs, draws[:, :-1], draws[:, -1], lengths)


def token_verdict(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    draws: Tensor,
    next_draw: Tensor,
    lengths: Tensor | None = None,
) -> Verdict:
    """Return what `token_verification` decides at given uniform numbers: `draws` (B, K) for the tests, `next_draw` (B,)."""
    law = token_law(draft_tokens, draft_probs, target_probs, lengths)
    num_accepted = (draws < law.pass_probs).long().cumprod(dim=1).sum(dim=1)
    next_probs = law.next_probs[torch.arange(len(draws), device=draft_tokens.device), num_accepted]
    return Verdict(num_accepted=num_accepted, next_token=sample(next_probs, next_draw))


class TokenVerification:
    """`verification=token`: see `token_verification`."""

    lossless = True
    program = "token"
    label = "token verification"

    def __call__(
        self,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        draws: Tensor,
        next_draw: Tensor,
        lengths: Tensor | None = None,
    ) -> Verdict:
        """Judge chains; see `token_verdict`."""
        return token_verdict(draft_tokens, draft_probs, target_probs, draws, next_draw, lengths)
