"""Speculative decoding with a head on one screen: no caches, no batches.

`SpeculativeDecoder` emits the same tokens at a seed.
"""

import torch

from specheads import AcceptanceHead, Pair, Warp
from specheads.heads.calibration import IndexCalibration, calibrated
from specheads.heads.features import drafting_features
from specheads.pair.sampling import Uniforms


@torch.no_grad()
def speculative_decode(
    pair: Pair,
    head: AcceptanceHead,
    prompt: list[int],
    max_new_tokens: int,
    warp: Warp,
    threshold: float = 0.7,
    seed: int = 0,
) -> list[int]:
    """Return the response to a prompt, ids of both (Huang et al. 2024, section 3.3; Leviathan et
    al. 2023, algorithm 1).
    """
    draft = pair.draft_lm
    target = pair.target_lm
    text = list(prompt)
    end = len(prompt) + max_new_tokens
    draft_uniforms, verify_uniforms = (
        Uniforms(torch.device("cpu"), seed, stream) for stream in (0, 1)
    )
    slope, intercept = IndexCalibration.from_dict(head.config.calibration).rows(
        1, torch.device("cpu")
    )
    while len(text) < end:
        # Draft: sample tokens from the draft, one fewer than fit, until the head expects that one
        # of them is rejected.
        drafted = []
        draft_probs = []
        survival = 1.0
        while len(drafted) < min(20, end - len(text) - 1):
            hidden = draft.hidden_states(torch.tensor([text + drafted]))[0, -1:]
            logits = draft.logits(hidden)
            draft_probs.append(warp(logits)[0])
            drafted.append(int(warp.draw(draft_probs[-1], draft_uniforms.take(1)[0])))
            features = drafting_features(
                head.config.inputs, logits, torch.tensor(drafted[-1:]), hidden, draft.embed
            )
            logit = calibrated(head(features), torch.tensor([len(drafted) - 1]), slope, intercept)
            survival *= logit.double().sigmoid().item()
            if 1 - survival > threshold or drafted[-1] in pair.stop_tokens:
                break
        # Verify: the target reads all drafted tokens at once, and each passes with probability
        # min(1, t / d).
        target_probs = warp(
            target.logits(target.hidden_states(torch.tensor([text + drafted]))[0, len(text) - 1 :])
        )
        uniform, next_uniform = verify_uniforms.take(2)
        passed = 1.0
        num_accepted = 0
        for token, of_target, of_draft in zip(drafted, target_probs, draft_probs, strict=False):
            passed *= (of_target[token] / of_draft[token]).clamp_max(1).item()
            if uniform >= passed:
                break
            num_accepted += 1
        # Commit: the accepted tokens, and one of the target's: after a rejection from the residual
        # distribution.
        following = target_probs[num_accepted]
        if num_accepted < len(drafted):
            following = (following - draft_probs[num_accepted]).clamp_min(0)
        for token in [*drafted[:num_accepted], int(Warp().draw(following, next_uniform))]:
            text.append(token)
            if token in pair.stop_tokens:
                return text[len(prompt) :]
    return text[len(prompt) :]
