"""Prompts with responses as padded tensors, and a model's states along them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import BATCH_TOKENS, batches_of_tokens, right_padded


@dataclass(frozen=True)
class ResponseBatch:
    """B texts, each a prompt and the response to it, with N response tokens in all."""

    tokens: Tensor  # (B, T) long, zeros after the texts' ends
    predicting: (
        Tensor  # (B, T) bool, the N positions before the response tokens, whose states predict them
    )

    @classmethod
    def of(
        cls, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], device: torch.device
    ) -> "ResponseBatch":
        """Return the batch of `prompts` and `responses`, ids (P,) and (R,) of each text.

        No prompt is empty.
        """
        tokens = right_padded(
            [np.concatenate(text) for text in zip(prompts, responses, strict=True)]
        )
        predicting = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            predicting[row, len(prompt) - 1 : len(prompt) + len(response) - 1] = True
        return cls(tokens.to(device), predicting.to(device))

    def states(self, lm: LanguageModel, together: bool = False) -> Tensor:
        """Return the states (N, H) that a model predicts response tokens from, on its device.

        `together`: in one pass.
        """
        tokens = self.tokens.to(lm.device)
        predicting = self.predicting.to(lm.device)
        # Nothing follows a text's last position. Texts of similar length are read together, so that
        # few positions are padding.
        ends = (
            (predicting * torch.arange(1, predicting.shape[1] + 1, device=lm.device))
            .amax(dim=1)
            .tolist()
        )
        pieces = [list(range(len(ends)))] if together else batches_of_tokens(ends, BATCH_TOKENS)
        states: dict[int, Tensor] = {}
        for rows in pieces:
            length = max(ends[row] for row in rows)
            piece = tokens[rows, :length]
            marks = predicting[rows, :length]
            found = lm.hidden_states(piece, use_cache=False)[marks].split(marks.sum(dim=1).tolist())
            states.update(zip(rows, found, strict=True))
        return torch.cat([states[row] for row in range(len(ends))])
