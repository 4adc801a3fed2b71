"""The loss of a draft on tokens of texts, in pieces: never more than a slice of both models' laws is held, nor kept for gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specheads.distill.divergences import Divergence, named_divergence, overlap
from specheads.errors import UserError, is_number
from specheads.pair import LanguageModel
from specheads.sampling import Warp

SLICE_ELEMENTS = 2**24  # logits of each model held at once

TargetLaws = Callable[[slice], Tensor]  # log-probabilities (n, V) of a slice of the tokens


@dataclass(frozen=True)
class LossSettings:
    """What a draft learns from the target's laws, and from the tokens themselves.

    Args:
        divergence: a name of DIVERGENCES; `beta` is Jensen-Shannon's.
        temperature: divides the logits of both models; above 0.
        top_k, top_p: cut the target's law as decoding does; 0 and 1: not at all.
        hard_weight: of the negative log-likelihood of the text's own token, beside the divergence; 0: none.
        token_share: share of a step's tokens to learn from, those where the draft has most to gain over a reference (AdaSPEC: Hu et al. 2025);
            1: all.
    """

    divergence: str = "total_variation"
    beta: float = 0.5
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    hard_weight: float = 0.0
    token_share: float = 1.0

    def __post_init__(self) -> None:
        named_divergence(self.divergence, self.beta)
        if not is_number(self.temperature) or self.temperature <= 0:
            raise UserError(f"loss.temperature={self.temperature} is not above 0; it divides the logits, for example 1.")
        if not is_number(self.hard_weight) or self.hard_weight < 0:
            raise UserError(f"loss.hard_weight={self.hard_weight} is no number of at least 0.")
        if not is_number(self.token_share) or not 0 < self.token_share <= 1:
            raise UserError(
                f"loss.token_share={self.token_share} is outside (0, 1]; it is a share of the tokens, for example 0.5."
            )
        self.warp  # noqa: B018 - which checks top_k and top_p

    @property
    def warp(self) -> Warp:
        return Warp(self.temperature, self.top_k, self.top_p)

    @property
    def function(self) -> Divergence:
        return named_divergence(self.divergence, self.beta)

    def log_target(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities (..., V) that the draft is to learn, minus infinity where they are cut off."""
        if not self.top_k and self.top_p == 1:
            return (logits / self.temperature).log_softmax(dim=-1)
        return self.warp(logits).log()

    def log_draft(self, logits: Tensor) -> Tensor:
        """Return the draft's log-probabilities (..., V)."""
        return (logits / self.temperature).log_softmax(dim=-1)


def slices(count: int, vocab_size: int) -> list[slice]:
    """Return the pieces in which tokens are gone through."""
    size = max(1, SLICE_ELEMENTS // vocab_size)
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def laws_of(lm: LanguageModel, hidden: Tensor, settings: LossSettings) -> TargetLaws:
    """Return what gives the target's laws of the tokens that come from states `hidden` (N, H)."""

    @torch.no_grad()
    def of(piece: slice) -> Tensor:
        return settings.log_target(lm.logits(hidden[piece]))

    return of


def token_losses(
    draft: LanguageModel, hidden: Tensor, laws: TargetLaws, tokens: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Return the loss of every token (N,), and the overlap (N,) of both laws there, which is its chance of acceptance.

    Args:
        hidden: (N, H) the draft's states that the tokens come from; gradients go there and to the output embedding.
        laws: of the target at the same places.
        tokens: (N,) the text's own.
    """
    measure = settings.function

    def of(hidden: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        logits, target = draft.logits(hidden), laws(piece).to(hidden.device)
        learnt = settings.log_draft(logits)
        value = measure(target, learnt)
        if settings.hard_weight:
            value = value - settings.hard_weight * logits.log_softmax(dim=-1).gather(1, tokens[piece, None])[:, 0]
        return value, overlap(target, learnt.detach())

    # Laws are computed again for the gradient: kept, they would be larger than the draft.
    parts = [checkpoint(of, hidden[piece], piece, use_reentrant=False) for piece in slices(len(tokens), draft.vocab_size)]
    values, shares = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(shares)


def most_to_gain(losses: Tensor, reference: Tensor, share: float) -> Tensor:
    """Return which tokens (N,) bool are among the `share` where the draft's loss exceeds that of a reference most."""
    count = max(1, round(share * len(losses)))
    chosen = (losses - reference).topk(count).indices
    return torch.zeros_like(losses, dtype=torch.bool).index_fill(0, chosen, True)
