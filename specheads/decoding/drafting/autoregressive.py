"""One token after the other, each sampled from the draft's own warped law."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specheads.decoding.engine import Engine
from specheads.pair import LanguageModel
from specheads.sampling import Warp, at_least_float32, entropy, sample, uniforms

PROBABILITY_FEATURES = frozenset({"draft_prob", "max_prob", "entropy"})


@dataclass(frozen=True)
class Step:
    """One drafted token: `token` (B,), the law it was drawn from `probs` (B, V), and what stopping rules asked to see."""

    token: Tensor
    probs: Tensor
    features: dict[str, Tensor] = field(repr=False)


class Autoregressive:
    """`drafting=autoregressive`: a chain, as long as the stopping rule lets it grow."""

    def steps(
        self, engine: Engine, pending: Tensor, warp: Warp, generator: torch.Generator, needs: frozenset[str]
    ) -> Iterator[Step]:
        """Yield drafted tokens, each after one draft forward.

        Args:
            engine: the draft model, which has everything before `pending` in memory.
            pending: (B, p) long, p >= 1, committed tokens that the draft has not consumed yet.
            needs: the features to compute (see specheads.decoding.stopping).
        """
        tokens = pending
        while True:
            output = engine.forward(tokens)
            logits = output.logits[:, -1]
            probs = warp(logits)
            token = sample(probs, uniforms((len(tokens),), generator))
            yield Step(token, probs, drafting_features(engine.lm, needs, logits, token, output.hidden[:, -1]))
            tokens = token[:, None]


def drafting_features(
    lm: LanguageModel, needs: frozenset[str], logits: Tensor, token: Tensor, hidden: Tensor
) -> dict[str, Tensor]:
    """Return the features in `needs` of tokens (...) drawn from draft `logits` (..., V) at `hidden` (..., H)."""
    features = {}
    if needs & PROBABILITY_FEATURES:
        plain = at_least_float32(logits).softmax(dim=-1)
        if "draft_prob" in needs:
            features["draft_prob"] = plain.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        if "max_prob" in needs:
            features["max_prob"] = plain.amax(dim=-1)
        if "entropy" in needs:
            features["entropy"] = entropy(plain)
    if "embedding" in needs:
        features["embedding"] = lm.embed(token)
    if "hidden" in needs:
        features["hidden"] = hidden
    if "token" in needs:
        features["token"] = token
    return features
