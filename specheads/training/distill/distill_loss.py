"""The loss of a draft on the tokens of responses: a divergence of its distributions from the
target's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import SLICE_ELEMENTS, slices
from specheads.pair.sampling import active, overlap

Divergence = Callable[[Tensor, Tensor], Tensor]
# Slices of the target's distributions over a draft's tokens that are held during a step
HELD_SLICES = 4


def forward_kl(target: Tensor, draft: Tensor) -> Tensor:
    """Return KL(t || d).

    Of a draft that lacks tokens, for which no weight could do anything, that of the others by t's
    share.
    """
    lacking = draft == -torch.inf
    return _kl_of_shared(
        target.masked_fill(lacking, -torch.inf), draft.masked_fill(lacking, torch.finfo().min)
    )


def _kl_of_shared(target: Tensor, draft: Tensor) -> Tensor:
    """Return `forward_kl` from the log-probabilities of the tokens that the draft has."""
    probs = target.exp()
    entropy = torch.special.entr(probs).sum(dim=-1)
    share = torch.special.entr(probs.sum(dim=-1))
    return share - entropy - (probs * draft).sum(dim=-1)


def _total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """Return 1 - overlap: the probability of a rejection (DistillSpec: Zhou et al. 2024).

    A draft has no more than the target of the tokens that it lacks, so these add nothing.
    """
    return (draft.exp() - target.exp()).clamp_min(0).sum(dim=-1)


DIVERGENCES: dict[str, Divergence] = {"forward_kl": forward_kl, "total_variation": _total_variation}


@dataclass(frozen=True)
class TargetDistributions:
    """The target's log-probabilities (n, V), or those of the tokens that a draft has.

    With `ids` (n, k), those of these tokens and then that of all others (n, k + 1).
    """

    log_probs: Tensor
    ids: Tensor | None = None

    def same_outcomes(self, logits: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of the same outcomes from logits of all tokens (n, ..., V),
        or of the `kept` ones (n, ..., V_kept), over which the target's must be.
        """
        if self.ids is None:
            return logits.log_softmax(dim=-1)
        total = logits.logsumexp(dim=-1, keepdim=True)
        if kept is None:
            return _with_rest(logits.gather(1, self.ids) - total)
        places = torch.searchsorted(kept, self.ids).clamp_max(len(kept) - 1)
        log_probs = logits.gather(1, places) - total
        return _with_rest(log_probs.masked_fill(kept[places] != self.ids, -torch.inf))


@dataclass(frozen=True)
class DistributionSource:
    """Returns the distributions of a slice of the N tokens over the vocabulary that a draft has
    kept, each of which takes so many numbers meanwhile.
    """

    of: Callable[[slice, Tensor | None], TargetDistributions]
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


def log_totals(logits: Tensor) -> Tensor:
    """Return the logarithm (n,) of the sum over all tokens of exp(logit), of logits (n, V)."""
    sums = active().softmax_sums(logits)
    return sums.largest + sums.total.log()


def computed_distributions(
    target: LanguageModel, hidden: Tensor, totals: Tensor | None = None
) -> DistributionSource:
    """Return a source that computes the target's distributions from its states `hidden` (N, H).

    Where their `log_totals` (N,) are known, it computes no logits that a draft lacks.
    """

    @torch.no_grad()
    def of(piece: slice, kept: Tensor | None) -> TargetDistributions:
        states = hidden[piece]
        if totals is not None and kept is not None:
            total = totals[piece, None].to(states.device)
            log_probs = target.logits_of(states, kept.to(states.device)) - total
        else:
            logits = target.logits(states)
            total = log_totals(logits)[:, None]
            log_probs = (logits if kept is None else logits[:, kept]) - total
        return TargetDistributions(log_probs)

    return DistributionSource(of, target.vocab_size)


def stored_distributions(ids: Tensor, log_probs: Tensor) -> DistributionSource:
    """Return a source of stored distributions.

    `ids` (N, k) and `log_probs` (N, k + 1) are as in TargetDistributions.
    """
    return DistributionSource(
        lambda piece, _: TargetDistributions(log_probs[piece].float(), ids[piece].long()),
        ids.shape[1],
    )


def token_losses(
    draft: LanguageModel, hidden: Tensor, distributions: DistributionSource, divergence: str
) -> tuple[Tensor, Tensor]:
    """Return each token's loss (N,) and overlap of both distributions (N,), from the draft's states
    `hidden` (N, H) before it; of states at J depths (N, J, H), (N, J) each.

    Stored distributions are for one depth.
    """
    kept = draft.kept_tokens
    num_kept = draft.vocab_size if kept is None else len(kept)
    lacks_none = draft.unknown is None
    divergence_of = DIVERGENCES[divergence]

    def of(hidden: Tensor, known: TargetDistributions) -> tuple[Tensor, Tensor]:
        # Of a reduced output the kept tokens alone: spread over all, they would take most of a
        # step's time.
        target = known.log_probs.to(hidden.device)
        if hidden.ndim == 3:
            target = target[:, None]
        log_probs = known.same_outcomes(draft.kept_logits(hidden), kept)
        if divergence_of is forward_kl and lacks_none and known.ids is None:
            losses = _kl_of_shared(target, log_probs)
        else:
            losses = divergence_of(target, log_probs)
        return losses, overlap(target.exp(), log_probs.detach().exp())

    def recomputed(hidden: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        return of(hidden, distributions.of(piece, kept))

    num_depths = hidden[..., 0].numel() // max(1, len(hidden))
    size = max(distributions.size, num_depths * num_kept)
    pieces = slices(len(hidden), size, SLICE_ELEMENTS)
    if len(pieces) == 1:
        return recomputed(hidden, pieces[0])
    # The draft's distributions are computed again for the gradient: kept, they would be larger than
    # the draft. The target's are if they are that large.
    again = len(hidden) * num_kept > HELD_SLICES * SLICE_ELEMENTS
    losses = []
    overlaps = []
    for piece in pieces:
        computed = recomputed if again else of
        known = piece if again else distributions.of(piece, kept)
        loss, shared = checkpoint(computed, hidden[piece], known, use_reentrant=False)
        losses.append(loss)
        overlaps.append(shared)
    return torch.cat(losses), torch.cat(overlaps)
