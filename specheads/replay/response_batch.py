"""Prompts with responses as padded tensors, a model's states along them, and the draft's temperature with the largest overlap."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specheads.forecast import progress
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import BATCH_TOKENS, SLICE_ELEMENTS, batches_of_tokens, right_padded, slices
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, check_finite, check_numbers, overlap


@dataclass(frozen=True)
class ResponseBatch:
    """B texts, each a prompt and the response to it, with N response tokens in all."""

    tokens: Tensor  # (B, T) long, zeros after the texts' ends
    predicting: Tensor  # (B, T) bool, the N positions before the response tokens, whose states predict them

    @classmethod
    def of(cls, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], device: torch.device) -> "ResponseBatch":
        """Return the batch of `prompts` and `responses`, ids (P,) and (R,) of each text; no prompt is empty."""
        tokens = right_padded([np.concatenate(text) for text in zip(prompts, responses, strict=True)])
        predicting = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            predicting[row, len(prompt) - 1 : len(prompt) + len(response) - 1] = True
        return cls(tokens.to(device), predicting.to(device))

    def states(self, lm: LanguageModel, together: bool = False) -> Tensor:
        """Return the states (N, H) that a model predicts response tokens from, on its device; `together`: in one pass."""
        tokens, predicting = self.tokens.to(lm.device), self.predicting.to(lm.device)
        # Nothing follows a text's last position. Texts of similar length are read together, so that few positions are padding.
        ends = (predicting * torch.arange(1, predicting.shape[1] + 1, device=lm.device)).amax(dim=1).tolist()
        pieces = [list(range(len(ends)))] if together else batches_of_tokens(ends, BATCH_TOKENS)
        states: dict[int, Tensor] = {}
        for rows in pieces:
            length = max(ends[row] for row in rows)
            piece, marks = tokens[rows, :length], predicting[rows, :length]
            found = lm.hidden_states(piece, use_cache=False)[marks].split(marks.sum(dim=1).tolist())
            states.update(zip(rows, found, strict=True))
        return torch.cat([states[row] for row in range(len(ends))])


# In the order of their distance from 1, which stays where none is better. A draft is rarely best outside of them.
TEMPERATURES = (1.0, 0.95, 1.05, 0.9, 1.1, 0.85, 1.15, 0.8, 1.2, 0.75, 0.7)

Text = tuple[np.ndarray, np.ndarray]  # ids of a prompt, and of the target's response to it


@torch.no_grad()
def overlaps_at(pair: Pair, texts: Sequence[Text], warp: Warp, batch_size: int) -> dict[float, float]:
    """Return the mean overlap under `warp` along the target's responses for each temperature of the pair's draft."""
    device, target = pair.draft_lm.device, pair.target_lm
    draft = LanguageModel(pair.draft, pair.vocab_size, known=pair.known_to_draft)  # without a temperature of its own
    sums, count = torch.zeros(len(TEMPERATURES), dtype=torch.float64), 0
    with progress("temperatures of the draft", len(texts)) as advance:
        for first in range(0, len(texts), batch_size):
            prompts, responses = zip(*texts[first : first + batch_size], strict=True)
            batch = ResponseBatch.of(prompts, responses, device)
            target_states, draft_states = batch.states(target), batch.states(draft)
            for piece in slices(len(draft_states), pair.vocab_size, SLICE_ELEMENTS):
                expected = warp(target.logits(target_states[piece]).to(device))
                logits = draft.logits(draft_states[piece])
                check_finite(pair.target_id, expected)
                check_numbers(pair.draft_id, logits)
                for number, temperature in enumerate(TEMPERATURES):
                    sums[number] += overlap(expected, warp(logits / temperature)).sum().item()
            count += len(draft_states)
            advance(len(prompts))
    return dict(zip(TEMPERATURES, (sums / count).tolist(), strict=True))


def best_temperature(overlaps: Mapping[float, float]) -> float:
    """Return the temperature with the largest overlap, the first of equals; verification stays lossless at any of them."""
    return max(overlaps, key=overlaps.__getitem__)
