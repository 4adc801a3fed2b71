"""How far a draft's distribution is from the target's, for each token, as losses to train the draft on.

All are functions of log-probabilities, `target` and `draft` (N, V), and return (N,) in float32 or wider; gradients go to the draft.
They are 0 where the distributions agree and positive elsewhere. A token that the target's warping rules out has minus infinity there.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specheads.sampling import overlap

Divergence = Callable[[Tensor, Tensor], Tensor]
FLOOR = -60.0  # replaces minus infinity where it is multiplied by a draft's probability: e^-60 is negligible


def finite(target: Tensor) -> Tensor:
    """Return log-probabilities with FLOOR in place of smaller ones, minus infinity included."""
    return target.clamp_min(FLOOR)


def forward_kl(target: Tensor, draft: Tensor) -> Tensor:
    """Return KL(t || d) = sum t log(t / d)."""
    return torch.where(target > -torch.inf, target.exp() * (target - draft), 0.0).sum(dim=-1)


def reverse_kl(target: Tensor, draft: Tensor) -> Tensor:
    """Return KL(d || t) = sum d log(d / t); what the target rules out counts as e^FLOOR."""
    return (draft.exp() * (draft - finite(target))).sum(dim=-1)


def jensen_shannon(target: Tensor, draft: Tensor, beta: float = 0.5) -> Tensor:
    """Return beta KL(t || m) + (1 - beta) KL(d || m) with m = beta t + (1 - beta) d (GKD: Agarwal et al. 2024)."""
    target = finite(target)
    log_weights = torch.tensor([beta, 1 - beta], dtype=draft.dtype, device=draft.device).log()
    mixture = torch.logaddexp(target + log_weights[0], draft + log_weights[1])
    return (beta * target.exp() * (target - mixture) + (1 - beta) * draft.exp() * (draft - mixture)).sum(dim=-1)


def acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """Return the overlap of the distributions, sum min(t, d): the probability that token verification accepts a token of the draft."""
    return overlap(target.exp(), draft.exp())


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """Return 1 - overlap: the probability of a rejection (DistillSpec: Zhou et al. 2024)."""
    return (target.exp() - draft.exp()).abs().sum(dim=-1) / 2


def log_overlap(target: Tensor, draft: Tensor) -> Tensor:
    """Return -log overlap: total variation with gradients that do not vanish where the distributions hardly overlap."""
    return -acceptance(target, draft).clamp_min(torch.finfo(draft.dtype).tiny).log()


def adaptive_mix(target: Tensor, draft: Tensor, rate: float = 3.0) -> Tensor:
    """Return lambda KL(t || d) + (1 - lambda) TV, lambda = exp(-rate overlap), through which no gradient flows.

    Where the distributions hardly overlap, it is mostly KL, whose gradients do not vanish; where they do, mostly the probability of a rejection.
    """
    share = torch.exp(-rate * acceptance(target, draft).detach())
    return share * forward_kl(target, draft) + (1 - share) * total_variation(target, draft)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "log_overlap": log_overlap,
    "adaptive_mix": adaptive_mix,
}


def named_divergence(name: str, beta: float = 0.5) -> Divergence:
    """Return the divergence of that name; `beta` in (0, 1) is Jensen-Shannon's."""
    return partial(jensen_shannon, beta=beta) if name == "jensen_shannon" else DIVERGENCES[name]
