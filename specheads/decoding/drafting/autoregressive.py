"""One token after the other, each sampled from the draft's own warped law."""

from typing import Any

import torch
from torch import Tensor

from specheads.decoding.engine import Engine, ForwardOutput
from specheads.decoding.records import Draft
from specheads.decoding.stopping import StoppingRule
from specheads.pair import LanguageModel
from specheads.sampling import Uniforms, Warp, at_least_float32, entropy, sample

PROBABILITY_FEATURES = frozenset({"draft_prob", "max_prob", "entropy"})


class Autoregressive:
    """`drafting=autoregressive`: a chain, as long as the stopping rule lets it grow."""

    def drafter(self, engine: Engine, warp: Warp, rule: StoppingRule) -> "ChainDrafter":
        """Return what drafts with these choices."""
        return ChainDrafter(engine, ChainStep(engine.lm, warp, rule))


class ChainStep:
    """What follows a draft forward: warp, sample, features, stop rule. Tensors in, tensors out: an engine may compile it."""

    def __init__(self, lm: LanguageModel, warp: Warp, rule: StoppingRule) -> None:
        self.lm, self.warp, self.rule = lm, warp, rule
        self.program = (ChainStep, warp, rule.program)

    def __call__(self, output: ForwardOutput, uniform: Tensor, ends: Tensor, state: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return the drafted token (B,), its law (B, V), whether to stop (B,) and the rule's new state.

        Args:
            uniform: (B,) that decides the token.
            ends: (V,) bool, the tokens that end a response and therefore a draft.
        """
        logits = output.logits[:, -1]
        probs = self.warp(logits)
        token = sample(probs, uniform)
        features = drafting_features(self.lm, self.rule.needs, logits, token, output.hidden[:, -1])
        state, stop = self.rule.step(state, features)
        return token, probs, stop | ends[token], state


class ChainDrafter:
    """Drafts chains into memory that is kept from round to round: a draft is valid until the next one."""

    def __init__(self, engine: Engine, step: ChainStep) -> None:
        lm, most = engine.lm, step.rule.max_tokens
        self._engine, self._rule, self._step = engine, step.rule, engine.unit(step)
        self._tokens = torch.zeros(most, dtype=torch.long, device=lm.device)
        self._probs = torch.zeros(most, lm.vocab_size, dtype=lm.probs_dtype, device=lm.device)

    def rehearse(self, ends: Tensor) -> None:
        """Prepare the engine for what drafting runs: forwards over one pending token, or two after a draft that was accepted."""
        device = self._engine.lm.device
        uniform, state = torch.zeros(1, dtype=torch.float64, device=device), self._rule.init(1, device)
        self._engine.rehearse(self._step, (1, 2), uniform, ends, state)

    def draft(self, pending: Tensor, state: Any, limit: int, draws: Uniforms, ends: Tensor) -> tuple[Draft, Any]:
        """Return a draft of at most `limit` tokens, and the rule's state.

        Args:
            pending: (1, p) long, p >= 1, committed tokens that the draft has not consumed yet.
        """
        tokens, count, limit = pending, 0, min(limit, len(self._tokens))
        while count < limit:
            token, probs, stop, state = self._step(tokens, draws.take(1), ends, state)
            # Copied, because an engine may overwrite a step's outcome in the next one.
            self._tokens[count], self._probs[count] = token[0], probs[0]
            count += 1
            if bool(stop):
                break
            tokens = token[:, None]
        return Draft.chain(self._tokens[:count], self._probs[:count], num_draft_calls=count), state


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
