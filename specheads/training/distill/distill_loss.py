"""The loss of a draft on the tokens of responses: a divergence of its distributions from the
target's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import SLICE_ELEMENTS, slices
from specheads.pair.sampling import overlap

Divergence = Callable[[Tensor, Tensor], Tensor]


def forward_kl(target: Tensor, draft: Tensor) -> Tensor:
    """Return KL(t || d).

    Of a draft that lacks tokens, for which no weight could do anything, that of the others by t's
    share.
    """
    both = (target > -torch.inf) & (draft > -torch.inf)
    probs = target.exp()
    lost = torch.where(draft > -torch.inf, 0.0, probs).sum(dim=-1)  # exactly 0 if nothing lacks
    divergence = torch.where(both, probs * (target - draft).masked_fill(~both, 0), 0.0).sum(dim=-1)
    return divergence + torch.special.entr((1 - lost).clamp_min(0))


def _total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """Return 1 - overlap: the probability of a rejection (DistillSpec: Zhou et al. 2024)."""
    return (target.exp() - draft.exp()).abs().sum(dim=-1) / 2


DIVERGENCES: dict[str, Divergence] = {"forward_kl": forward_kl, "total_variation": _total_variation}


@dataclass(frozen=True)
class TargetDistributions:
    """The target's log-probabilities (n, V).

    With `ids` (n, k), those of these tokens and then that of all others (n, k + 1).
    """

    log_probs: Tensor
    ids: Tensor | None = None

    def over(self, kept: Tensor | None) -> "TargetDistributions":
        """Return them over the outcomes of a draft that has `kept` tokens (V_kept,): these, and
        then all others (n, V_kept + 1). Stored ones are returned unchanged.
        """
        if kept is None or self.ids is not None:
            return self
        others = self.log_probs.index_fill(1, kept, -torch.inf).logsumexp(dim=-1, keepdim=True)
        return TargetDistributions(torch.cat([self.log_probs[:, kept], others], dim=-1))

    def same_outcomes(self, log_probs: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of the same outcomes from those of all tokens (n, ..., V),
        or of the `kept` ones (n, ..., V_kept), over which the target's must be.
        """
        if self.ids is None:
            return log_probs if kept is None else pad(log_probs, (0, 1), value=-torch.inf)
        if kept is None:
            return _with_rest(log_probs.gather(1, self.ids))
        places = torch.searchsorted(kept, self.ids).clamp_max(len(kept) - 1)
        return _with_rest(
            log_probs.gather(1, places).masked_fill(kept[places] != self.ids, -torch.inf)
        )


@dataclass(frozen=True)
class DistributionSource:
    """Returns the distributions of a slice of the N tokens, each of which takes so many numbers
    meanwhile.
    """

    of: Callable[[slice], TargetDistributions]
    size: int


def _with_rest(log_probs: Tensor) -> Tensor:
    """Return log-probabilities (n, k) of some tokens, followed by that of all other tokens, (n, k +
    1).
    """
    rest = (1 - log_probs.exp().sum(dim=-1, keepdim=True)).clamp_min(0)
    # Rounding may leave a small rest where there is none: a rest of that size counts as none, and
    # has no gradient.
    limits = torch.finfo(log_probs.dtype)
    return torch.cat(
        [log_probs, torch.where(rest > 4 * limits.eps, rest, limits.tiny).log()], dim=-1
    )


def most_likely(log_probs: Tensor, count: int) -> TargetDistributions:
    """Return distributions (n, V) reduced to their `count` most likely tokens and the rest."""
    top = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
    return TargetDistributions(_with_rest(top.values), top.indices)


def computed_distributions(target: LanguageModel, hidden: Tensor) -> DistributionSource:
    """Return a source that computes the target's distributions from its states `hidden` (N, H)."""

    @torch.no_grad()
    def of(piece: slice) -> TargetDistributions:
        return TargetDistributions(target.logits(hidden[piece]).log_softmax(dim=-1))

    return DistributionSource(of, target.vocab_size)


def stored_distributions(ids: Tensor, log_probs: Tensor) -> DistributionSource:
    """Return a source of stored distributions.

    `ids` (N, k) and `log_probs` (N, k + 1) are as in TargetDistributions.
    """
    return DistributionSource(
        lambda piece: TargetDistributions(log_probs[piece].float(), ids[piece].long()), ids.shape[1]
    )


def token_losses(
    draft: LanguageModel, hidden: Tensor, distributions: DistributionSource, divergence: str
) -> tuple[Tensor, Tensor]:
    """Return each token's loss (N,) and overlap of both distributions (N,), from the draft's states
    `hidden` (N, H) before it; of states at J depths (N, J, H), (N, J) each.

    Stored distributions are for one depth.
    """

    def of(hidden: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        # Of a reduced output the kept tokens alone: spread over all, they would take most of a
        # step's time.
        distribution = distributions.of(piece).over(kept)
        target = distribution.log_probs.to(hidden.device)
        if hidden.ndim == 3:
            target = target[:, None]
        log_probs = distribution.same_outcomes(draft.kept_logits(hidden).log_softmax(dim=-1), kept)
        return DIVERGENCES[divergence](target, log_probs), overlap(
            target.exp(), log_probs.detach().exp()
        )

    kept = draft.kept_tokens
    num_outputs = draft.vocab_size if kept is None else len(kept)
    num_outputs *= hidden[..., 0].numel() // max(1, len(hidden))
    pieces = slices(len(hidden), max(distributions.size, num_outputs), SLICE_ELEMENTS)
    if len(pieces) == 1:
        return of(hidden, pieces[0])
    # Distributions are computed again for the gradient: kept, they would be larger than the draft.
    losses = []
    overlaps = []
    for piece in pieces:
        loss, shared = checkpoint(of, hidden[piece], piece, use_reentrant=False)
        losses.append(loss)
        overlaps.append(shared)
    return torch.cat(losses), torch.cat(overlaps)
