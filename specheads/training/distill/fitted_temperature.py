"""The temperature at which a draft that has been trained agrees with its target most often, chosen on dev prompts."""

import logging
from dataclasses import replace

import torch

from specheads.language_model import LanguageModel, set_draft_temperature
from specheads.padding import SLICE_ELEMENTS, slices
from specheads.pair import Pair
from specheads.sampling import Warp, overlap
from specheads.training.distill.response_batch import ResponseBatch
from specheads.training.distill.samples import HeldOutSamples

logger = logging.getLogger(__name__)

# In the order of their distance from 1, which stays where none is better. A draft is rarely best outside of them.
TEMPERATURES = (1.0, 0.95, 1.05, 0.9, 1.1, 0.85, 1.15, 0.8, 1.2, 0.75, 0.7)


@torch.no_grad()
def overlaps_at(pair: Pair, samples: HeldOutSamples, warp: Warp, batch_size: int) -> dict[float, float]:
    """Return the mean overlap under `warp` along the target's responses for each of TEMPERATURES of the pair's draft."""
    device, target = pair.draft_lm.device, pair.target_lm
    drafts = [LanguageModel(pair.draft, pair.vocab_size, temperature) for temperature in TEMPERATURES]
    sums, count = torch.zeros(len(drafts), dtype=torch.float64), 0
    for first in range(0, len(samples), batch_size):
        rows = range(first, min(first + batch_size, len(samples)))
        batch = ResponseBatch.of_samples([samples[0, row] for row in rows], device)
        target_states, draft_states = batch.states(target), batch.states(drafts[0])
        for piece in slices(len(draft_states), pair.vocab_size, SLICE_ELEMENTS):
            expected = warp(target.logits(target_states[piece]).to(device))
            for number, draft in enumerate(drafts):
                sums[number] += overlap(expected, warp(draft.logits(draft_states[piece]))).sum().item()
        count += len(draft_states)
    return dict(zip(TEMPERATURES, (sums / count).tolist(), strict=True))


def with_fitted_temperature(pair: Pair, samples: HeldOutSamples, warp: Warp, batch_size: int) -> Pair:
    """Write the best temperature into the config of the pair's draft; return the pair that drafts at it.

    Verification stays lossless at any temperature of the draft, so the one with the largest overlap is the best.
    """
    overlaps = overlaps_at(pair, samples, warp, batch_size)
    best = max(TEMPERATURES, key=overlaps.__getitem__)  # the first of equals
    set_draft_temperature(pair.draft, best)
    logger.info("draft temperature %g: overlap %.4f on dev prompts, %.4f at 1", best, overlaps[best], overlaps[1.0])
    return replace(pair)
