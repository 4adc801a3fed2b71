"""The features of a drafted token, all that heads and stopping rules may read, in one table: a new
input is one entry here, and its name in config.py's KNOWN_INPUTS.

Exported files carry a copy of this source; it needs nothing but torch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.pair.sampling import at_least_float32

LEAST_PROB = 1e-12  # replaces smaller probabilities, so that their logarithm is finite


class _SoftmaxSums(NamedTuple):
    """Sums over the vocabulary from which the features of a softmax without temperature or cuts are
    computed.
    """

    logits: Tensor  # (..., V), float32 or wider
    largest: Tensor  # (..., 1), the largest logit
    total: Tensor  # (...), the sum of exp(logit - largest)
    moment: Tensor  # (...), the sum of exp(logit - largest) * (logit - largest)


class DraftedToken(NamedTuple):
    """The data from which features of drafted tokens (...) are computed.

    Fields that no requested feature reads may be None.
    """

    token: Tensor  # (...) long
    hidden: Tensor  # (..., H), the draft's hidden state that the token was sampled from
    embed: Callable[[Tensor], Tensor]  # the draft's input embedding
    softmax: _SoftmaxSums  # sums over the draft's logits


@dataclass(frozen=True)
class Feature:
    """One entry of the table."""

    compute: Callable[[DraftedToken], Tensor]
    size: str | None = (
        None  # key of a head's config that holds the length of the vector; None: a single number
    )
    transform: Callable[[Tensor], Tensor] | None = None  # applied before it enters the network
    reads_logits: bool = False  # whether it is computed from the draft's logits
    of_token: bool = False  # whether it differs between tokens that may be sampled at one position
    stored: bool = True  # whether the feature store holds it; what is cheap is computed again
    recorded: bool = False  # whether recordings hold it, for rules without a head


def log_prob(prob: Tensor) -> Tensor:
    """Return the logarithm of probabilities (...), at least that of LEAST_PROB."""
    return prob.clamp_min(LEAST_PROB).log()


def second_prob(drafted: DraftedToken) -> Tensor:
    """Return the probability (...) of the second most likely token.

    It equals the largest one if two tokens are most likely.
    """
    logits, largest, total, _ = drafted.softmax
    return (logits.topk(2, dim=-1).values[..., 1] - largest.squeeze(-1)).exp() / total


def draft_prob(drafted: DraftedToken) -> Tensor:
    """Return the probability (...) of the drafted token."""
    logits, largest, total, _ = drafted.softmax
    return (logits.gather(-1, drafted.token.unsqueeze(-1)) - largest).squeeze(-1).exp() / total


FEATURES = {
    "hidden": Feature(lambda drafted: drafted.hidden, size="hidden_size"),
    # The draft's input embedding of the token. A look-up, so it is not stored.
    "embedding": Feature(
        lambda drafted: drafted.embed(drafted.token),
        size="embedding_size",
        of_token=True,
        stored=False,
    ),
    # Probabilities and entropy (nats) of the draft's plain softmax, whatever the warp, so that they
    # are informative in greedy decoding.
    "draft_prob": Feature(
        draft_prob, transform=log_prob, reads_logits=True, of_token=True, recorded=True
    ),
    "max_prob": Feature(
        lambda drafted: 1 / drafted.softmax.total, reads_logits=True, recorded=True
    ),
    "entropy": Feature(
        lambda drafted: (
            drafted.softmax.total.log() - drafted.softmax.moment / drafted.softmax.total
        ),
        reads_logits=True,
        recorded=True,
    ),
    "second_prob": Feature(second_prob, transform=log_prob, reads_logits=True),
    # The token's id, for stopping rules only.
    "token": Feature(lambda drafted: drafted.token, of_token=True, stored=False),
}
RECORDED = tuple(name for name, feature in FEATURES.items() if feature.recorded)


def _softmax_sums(logits: Tensor) -> _SoftmaxSums:
    """Return the sums of logits (..., V) of any float type, in two passes over them."""
    logits = at_least_float32(logits)
    largest = logits.amax(dim=-1, keepdim=True)
    # A logit of minus infinity counts for nothing: 0 log 0 = 0.
    below = (logits - largest).clamp_min(torch.finfo(logits.dtype).min)
    weights = below.exp()
    return _SoftmaxSums(logits, largest, weights.sum(dim=-1), (weights * below).sum(dim=-1))


def drafting_features(
    needs: Collection[str],
    logits: Tensor,
    token: Tensor,
    hidden: Tensor | None = None,
    embed: Callable[[Tensor], Tensor] | None = None,
    kept_tokens: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return by name the features in `needs` of drafted tokens, (...) or (..., size).

    Args:
        logits: (..., V) of the draft that the tokens (...) long were sampled from; not read where
            no feature needs them.
        hidden: (..., H), the draft's hidden states from which `logits` were computed, if a feature
            needs them.
        embed: the draft's input embedding, a function of token ids, if a feature needs it.
        kept_tokens: (V_kept,) long, those that the draft's output has; None: all. Sums without the
            others are faster.
    """
    softmax = None
    if reads_logits(needs):
        softmax = _softmax_sums(
            logits if kept_tokens is None else logits.index_select(-1, kept_tokens)
        )
        softmax = softmax._replace(logits=at_least_float32(logits))
    drafted = DraftedToken(token, hidden, embed, softmax)  # type: ignore[arg-type]  # None where no feature reads it
    return {name: feature.compute(drafted) for name, feature in FEATURES.items() if name in needs}


def input_size(inputs: Sequence[str], sizes: Mapping[str, Any]) -> int:
    """Return the number of values in the features `inputs`.

    `sizes` has the lengths of vectors, by keys of a head's config.
    """
    return sum(1 if (key := FEATURES[name].size) is None else sizes[key] for name in inputs)


def reads_logits(names: Collection[str]) -> bool:
    """Whether one of these features is computed from the draft's logits."""
    return any(FEATURES[name].reads_logits for name in names)
