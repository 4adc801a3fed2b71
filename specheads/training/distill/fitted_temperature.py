"""The temperature of a draft that has been trained, chosen on dev prompts and written into its config."""

import logging
from dataclasses import replace

from specheads.language_model import set_draft_temperature
from specheads.pair import Pair
from specheads.replay.draft_temperature import best_temperature, overlaps_at
from specheads.sampling import Warp
from specheads.training.distill.samples import HeldOutSamples

logger = logging.getLogger(__name__)


def with_fitted_temperature(pair: Pair, samples: HeldOutSamples, warp: Warp, batch_size: int) -> Pair:
    """Write the best temperature into the config of the pair's draft; return the pair that drafts at it."""
    texts = [(samples.prompts[row], samples.responses[row]) for row in range(len(samples))]
    overlaps = overlaps_at(pair, texts, warp, batch_size)
    best = best_temperature(overlaps)
    set_draft_temperature(pair.draft, best)
    logger.info("draft temperature %g: overlap %.4f on dev prompts, %.4f at 1", best, overlaps[best], overlaps[1.0])
    return replace(pair)
