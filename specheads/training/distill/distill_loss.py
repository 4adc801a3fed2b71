"""The loss of a draft on tokens of texts, in pieces: never more than one piece of both models' laws is held, nor kept for gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specheads.errors import UserError, is_number
from specheads.padding import SLICE_ELEMENTS, slices
from specheads.pair import LanguageModel
from specheads.sampling import Warp
from specheads.training.distill.divergences import Divergence, acceptance, named_divergence


@dataclass(frozen=True)
class StoredDistribution:
    """The target's laws of n tokens: log-probabilities (n, V); or, with `ids` (n, k), of these and of all others together (n, k + 1)."""

    log_probs: Tensor
    ids: Tensor | None = None

    def of_draft(self, log_probs: Tensor) -> Tensor:
        """Return a draft's log-probabilities (n, V) of the same outcomes."""
        return log_probs if self.ids is None else with_rest(log_probs.gather(1, self.ids))


TargetProbs = Callable[[slice], StoredDistribution]  # of a slice of the tokens


def with_rest(log_probs: Tensor) -> Tensor:
    """Return log-probabilities (n, k) of some tokens with that of all others behind them (n, k + 1)."""
    rest = (1 - log_probs.exp().sum(dim=-1, keepdim=True)).clamp_min(0)
    # Rounding leaves a rest where there is none; what is smaller than it could be counts as none, and has no gradient.
    limits = torch.finfo(log_probs.dtype)
    return torch.cat([log_probs, torch.where(rest > 4 * limits.eps, rest, limits.tiny).log()], dim=-1)


def kept(log_probs: Tensor, count: int) -> StoredDistribution:
    """Return laws (n, V) reduced to their `count` likeliest tokens and the rest."""
    found = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
    return StoredDistribution(with_rest(found.values), found.indices)


@dataclass(frozen=True)
class LossSettings:
    """What a draft learns from the target's laws, and from the tokens themselves.

    Args:
        divergence: a name of DIVERGENCES; `beta` is Jensen-Shannon's.
        temperature: divides the logits of both models; above 0.
        top_k, top_p: cut the target's law as decoding does; 0 and 1: not at all.
        hard_weight: of the negative log-likelihood of the text's own token, beside the divergence; 0: none.
        token_share: share of each batch's tokens to learn from, those where the draft has most to gain over a reference (AdaSPEC: Hu et al. 2025);
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


def laws_of(lm: LanguageModel, hidden: Tensor, settings: LossSettings) -> TargetProbs:
    """Return what gives the target's laws of the tokens that come from states `hidden` (N, H)."""

    @torch.no_grad()
    def of(piece: slice) -> StoredDistribution:
        return StoredDistribution(settings.log_target(lm.logits(hidden[piece])))

    return of


def stored_probs(ids: Tensor, log_probs: Tensor) -> TargetProbs:
    """Return what gives laws of which some tokens `ids` (N, k) and `log_probs` (N, k + 1), the last of all others, were stored."""
    return lambda piece: StoredDistribution(log_probs[piece].float(), ids[piece].long())


def token_losses(
    draft: LanguageModel, hidden: Tensor, distributions: TargetProbs, tokens: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Return the loss of every token (N,), and the overlap (N,) of both laws there, which is its chance of acceptance.

    Args:
        hidden: (N, H) the draft's states that the tokens come from; gradients go there and to the output embedding.
        laws: of the target at the same places.
        tokens: (N,) the text's own.
    """
    measure = settings.function

    def of(hidden: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        logits, distribution = draft.logits(hidden), distributions(piece)
        target = distribution.log_probs.to(hidden.device)
        learnt = distribution.of_draft(settings.log_draft(logits))
        value = measure(target, learnt)
        if settings.hard_weight:
            value = value - settings.hard_weight * logits.log_softmax(dim=-1).gather(1, tokens[piece, None])[:, 0]
        return value, acceptance(target, learnt.detach())

    pieces = slices(len(tokens), draft.vocab_size, SLICE_ELEMENTS)
    if len(pieces) == 1:
        return of(hidden, pieces[0])
    # Laws are computed again for the gradient: kept, they would be larger than the draft.
    values, shares = zip(*(checkpoint(of, hidden[piece], piece, use_reentrant=False) for piece in pieces), strict=True)
    return torch.cat(values), torch.cat(shares)


def most_to_gain(losses: Tensor, reference: Tensor, share: float) -> Tensor:
    """Return which tokens (N,) bool are among the `share` where the draft's loss exceeds that of a reference most."""
    count = max(1, round(share * len(losses)))
    chosen = (losses - reference).topk(count).indices
    return torch.zeros_like(losses, dtype=torch.bool).index_fill(0, chosen, True)
