"""How good a draft is for its target: overlap, KL divergence and agreement along the target's responses, and block efficiency."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from specheads.forecast import progress
from specheads.pair.padding import SLICE_ELEMENTS, slices
from specheads.pair.pair import Pair
from specheads.pair.revisions import set_draft_temperature
from specheads.pair.sampling import Warp, check_numbers, overlap
from specheads.replay.response_batch import best_temperature, overlaps_at
from specheads.training.distill.distill_loss import forward_kl
from specheads.training.distill.samples import Sample, Samples, batch_of
from specheads.training.distill.sharding import is_sharded

logger = logging.getLogger(__name__)

BLOCK = 4  # drafted tokens per round of the block efficiencies that are recorded
MEANINGS = {
    "overlap": "the share of drafted tokens that the target accepts",
    "kl": "KL(target || draft) in nats, of the tokens that the draft has",
    "agreement": "the share of tokens at which both models hold the same one most likely",
    f"block_efficiency_{BLOCK}": f"tokens per call of the target with {BLOCK} drafted ones, by the overlap",
}


def block_efficiency(overlap: float, num_tokens: int = BLOCK) -> float:
    """Return the expected tokens per round, `(1 - a^(K+1)) / (1 - a)` for overlap a (Leviathan et al. 2023, equation 1)."""
    return sum(overlap**count for count in range(num_tokens + 1))


@torch.no_grad()
def quality_sums(pair: Pair, samples: Sequence[Sample], warp: Warp, device: torch.device) -> Tensor:
    """Return (4,) sums over response tokens: overlap under `warp`, KL(t || d), same most likely token (1 or 0), and 1."""
    batch = batch_of(samples, device)
    models = (pair.target_lm, pair.draft_lm)
    # The layers of a sharded draft must run equally often in all processes.
    states = [batch.states(pair.target_lm), batch.states(pair.draft_lm, together=is_sharded(pair.draft))]
    sums = torch.zeros(4, dtype=torch.float64)
    for piece in slices(len(states[0]), pair.vocab_size, SLICE_ELEMENTS):
        logits = [lm.logits(hidden[piece]).to(device) for lm, hidden in zip(models, states, strict=True)]
        for model_id, each in zip((pair.target_id, pair.draft_id), logits, strict=True):
            check_numbers(model_id, each)
        target_token, draft_token = (each.argmax(-1) for each in logits)
        parts = (
            overlap(*map(warp, logits)).sum(),
            forward_kl(*(each.log_softmax(-1) for each in logits)).sum(),
            (target_token == draft_token).sum(),
        )
        sums += torch.tensor([*(part.item() for part in parts), len(logits[0])], dtype=torch.float64)
    return sums.to(device, torch.float32 if device.type == "mps" else torch.float64)


def quality_of(sums: Tensor) -> dict[str, float]:
    """Return the figures of a draft, by name, from sums (4,) over tokens."""
    share, divergence, agreement = (sums[:3] / sums[3]).tolist()
    return {"overlap": share, "kl": divergence, "agreement": agreement, f"block_efficiency_{BLOCK}": block_efficiency(share)}


def draft_quality(pair: Pair, samples: Samples, warp: Warp, batch_size: int) -> dict[str, float]:
    """Return the figures of a pair's draft, with its present weights, over all samples."""
    device, was_training = pair.draft_lm.device, pair.draft.training
    pair.draft.eval()
    keys, sums = [(0, row) for row in range(len(samples))], list[Tensor]()
    with progress("measuring the draft", len(keys)) as advance:
        for first in range(0, len(keys), batch_size):
            batch = [samples[key] for key in keys[first : first + batch_size]]
            sums.append(quality_sums(pair, batch, warp, device))
            advance(len(batch))
    pair.draft.train(was_training)
    return quality_of(reduce(torch.add, sums))


def with_fitted_temperature(pair: Pair, samples: Samples, warp: Warp, batch_size: int) -> Pair:
    """Write the best temperature into the config of the pair's draft; return the pair that drafts at it."""
    responses = [response for (response,) in samples.answers]
    overlaps = overlaps_at(pair, list(zip(samples.prompts, responses, strict=True)), warp, batch_size)
    best = best_temperature(overlaps)
    set_draft_temperature(pair.draft, best)
    logger.info("draft temperature %g: overlap %.4f on dev prompts, %.4f at 1", best, overlaps[best], overlaps[1.0])
    return replace(pair)
