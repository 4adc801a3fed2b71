"""Speculative decoding on one screen: token verification on two models without caches, batches or compilation.

For reading and for tests: `SpeculativeDecoder` emits the same tokens at the same seed.
"""

from collections.abc import Sequence

import torch

from specheads.language_model import LanguageModel
from specheads.pair import Pair
from specheads.sampling import Uniforms, Warp


@torch.no_grad()
def speculative_decode(
    pair: Pair, prompt_ids: Sequence[int], max_new_tokens: int, num_drafted: int, warp: Warp, seed: int = 0
) -> list[int]:
    """Return the response to `prompt_ids`, drafted `num_drafted` tokens at a time.

    Source: Leviathan et al. 2023, algorithm 1.
    """
    text, end = list(prompt_ids), len(prompt_ids) + max_new_tokens
    draft_uniforms, verify_uniforms = (Uniforms(torch.device("cpu"), seed, stream) for stream in (0, 1))

    def next_probs(lm: LanguageModel, tokens: Sequence[int]) -> torch.Tensor:
        """Return the distributions (T, V) after each of T tokens."""
        return warp(lm.logits(lm.hidden_states(torch.tensor([tokens])))[0])

    while len(text) < end:
        # Draft: sample tokens from the draft, one fewer than fit, because the target adds one.
        drafted: list[int] = []
        draft_probs: list[torch.Tensor] = []
        while len(drafted) < min(num_drafted, end - len(text) - 1) and (not drafted or drafted[-1] not in pair.stop_tokens):
            draft_probs.append(next_probs(pair.draft_lm, [*text, *drafted])[-1])
            drafted.append(int(warp.draw(draft_probs[-1], draft_uniforms.take(1)[0])))
        # Verify: the target reads all drafted tokens at once, and each passes with probability min(1, t / d).
        target_probs = next_probs(pair.target_lm, [*text, *drafted])[len(text) - 1 :]
        uniform, next_uniform = verify_uniforms.take(2)
        survival, num_accepted = 1.0, 0
        for token, target, draft in zip(drafted, target_probs, draft_probs, strict=False):
            survival *= (target[token] / draft[token]).clamp_max(1).item()
            if uniform >= survival:
                break
            num_accepted += 1
        # Commit: the accepted tokens, and one of the target's: after a rejection from the residual.
        following = target_probs[num_accepted]
        if num_accepted < len(drafted):
            following = (following - draft_probs[num_accepted]).clamp_min(0)
        for token in [*drafted[:num_accepted], int(Warp().draw(following, next_uniform))]:
            text.append(token)
            if token in pair.stop_tokens:
                return text[len(prompt_ids) :]
    return text[len(prompt_ids) :]
