"""The features of a drafted token, all that heads and stopping rules may read, in one table: a new
input is one entry here, and its name in config.py's KNOWN_INPUTS.

Exported files carry a copy of this source; it needs nothing but torch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from specheads.pair.sampling import SoftmaxSums, at_least_float32, softmax_sums

LEAST_PROB = 1e-12  # replaces smaller probabilities, so that their logarithm is finite


class DraftedToken(NamedTuple):
    """The data from which features of drafted tokens (...) are computed.

    Fields that no requested feature reads may be None.
    """

    token: Tensor  # (...) long
    hidden: Tensor  # (..., H), the draft's hidden state that the token was sampled from
    embed: Callable[[Tensor], Tensor]  # the draft's input embedding
    logits: Tensor  # (..., V), float32 or wider
    softmax: SoftmaxSums  # sums over the draft's logits
    depth: Tensor  # (...) long, how many tokens of the round were drafted before


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
    largest, total, _ = drafted.softmax
    return (drafted.logits.topk(2, dim=-1).values[..., 1] - largest).exp() / total


def draft_prob(drafted: DraftedToken) -> Tensor:
    """Return the probability (...) of the drafted token."""
    largest, total, _ = drafted.softmax
    logit = drafted.logits.gather(-1, drafted.token.unsqueeze(-1)).squeeze(-1)
    return (logit - largest).exp() / total


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
    # Of drafts that read their target: how many steps before the state's read the draft's states in
    # place of the target's. It is known everywhere, so it is not stored.
    "depth": Feature(
        lambda drafted: drafted.depth.float(), transform=lambda depth: depth.log1p(), stored=False
    ),
    # The token's id, for stopping rules only.
    "token": Feature(lambda drafted: drafted.token, of_token=True, stored=False),
}
RECORDED = tuple(name for name, feature in FEATURES.items() if feature.recorded)


def drafting_features(
    needs: Collection[str],
    logits: Tensor,
    token: Tensor,
    hidden: Tensor | None = None,
    embed: Callable[[Tensor], Tensor] | None = None,
    kept_tokens: Tensor | None = None,
    sums_of: Callable[[Tensor], SoftmaxSums] = softmax_sums,
    depth: Tensor | None = None,
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
        sums_of: computes the sums; a device may have a faster way.
        depth: (...) long, how many tokens of the round were drafted before, if a feature needs it.
    """
    softmax = None
    if reads_logits(needs):
        kept = logits if kept_tokens is None else logits.index_select(-1, kept_tokens)
        softmax = sums_of(at_least_float32(kept))
        logits = at_least_float32(logits)
    drafted = DraftedToken(token, hidden, embed, logits, softmax, depth)  # type: ignore[arg-type]  # None where no feature reads it
    return {name: feature.compute(drafted) for name, feature in FEATURES.items() if name in needs}


def input_size(inputs: Sequence[str], sizes: Mapping[str, Any]) -> int:
    """Return the number of values in the features `inputs`.

    `sizes` has the lengths of vectors, by keys of a head's config.
    """
    return sum(1 if (key := FEATURES[name].size) is None else sizes[key] for name in inputs)


def reads_logits(names: Collection[str]) -> bool:
    """Whether one of these features is computed from the draft's logits."""
    return any(FEATURES[name].reads_logits for name in names)
