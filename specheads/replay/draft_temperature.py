"""The temperature of its own at which a draft agrees with its target most often.

Verification stays lossless at any temperature of the draft, so the one with the largest overlap is the best.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from specheads.language_model import LanguageModel
from specheads.padding import SLICE_ELEMENTS, slices
from specheads.pair import Pair
from specheads.replay.response_batch import ResponseBatch
from specheads.sampling import Warp, check_finite, check_numbers, overlap

# In the order of their distance from 1, which stays where none is better. A draft is rarely best outside of them.
TEMPERATURES = (1.0, 0.95, 1.05, 0.9, 1.1, 0.85, 1.15, 0.8, 1.2, 0.75, 0.7)

Text = tuple[np.ndarray, np.ndarray]  # ids of a prompt, and of the target's response to it


@torch.no_grad()
def overlaps_at(
    pair: Pair, texts: Sequence[Text], warp: Warp, batch_size: int, temperatures: Sequence[float] = TEMPERATURES
) -> dict[float, float]:
    """Return the mean overlap under `warp` along the target's responses for each temperature of the pair's draft."""
    device, target = pair.draft_lm.device, pair.target_lm
    draft = LanguageModel(pair.draft, pair.vocab_size, known=pair.known_to_draft)  # without a temperature of its own
    sums, count = torch.zeros(len(temperatures), dtype=torch.float64), 0
    for first in range(0, len(texts), batch_size):
        prompts, responses = zip(*texts[first : first + batch_size], strict=True)
        batch = ResponseBatch.of(prompts, responses, device)
        target_states, draft_states = batch.states(target), batch.states(draft)
        for piece in slices(len(draft_states), pair.vocab_size, SLICE_ELEMENTS):
            expected = warp(target.logits(target_states[piece]).to(device))
            logits = draft.logits(draft_states[piece])
            check_finite(pair.target_id, expected)
            check_numbers(pair.draft_id, logits)
            for number, temperature in enumerate(temperatures):
                sums[number] += overlap(expected, warp(logits / temperature)).sum().item()
        count += len(draft_states)
    return dict(zip(temperatures, (sums / count).tolist(), strict=True))


def best_temperature(overlaps: Mapping[float, float]) -> float:
    """Return the temperature with the largest overlap, the first of equals."""
    return max(overlaps, key=overlaps.__getitem__)
