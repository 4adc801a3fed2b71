"""Prompts with responses as padded tensors, and a model's states along them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specheads.language_model import LanguageModel
from specheads.padding import BATCH_TOKENS, right_padded, slices


@dataclass(frozen=True)
class ResponseBatch:
    """B texts, each a prompt and the response to it, with N response tokens in all.

    `tokens` (B, T) long has zeros after the texts' ends. `predicting` (B, T) bool marks the N positions whose states predict the
    response tokens: the position before each of them.
    """

    tokens: Tensor
    predicting: Tensor

    @classmethod
    def of(cls, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], device: torch.device) -> "ResponseBatch":
        """Return the batch of `prompts` and `responses`, ids (P,) and (R,) of each text; no prompt is empty."""
        tokens = right_padded([np.concatenate(text) for text in zip(prompts, responses, strict=True)])
        predicting = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            predicting[row, len(prompt) - 1 : len(prompt) + len(response) - 1] = True
        return cls(tokens.to(device), predicting.to(device))

    @property
    def response_tokens(self) -> Tensor:
        """The tokens of all responses (N,)."""
        return self.tokens[:, 1:][self.predicting[:, :-1]]

    def states(self, lm: LanguageModel, together: bool = False) -> Tensor:
        """Return the states (N, H) that a model predicts the response tokens from, on its device.

        `together`: it reads all texts in one forward pass, however many tokens they have.
        """
        tokens, predicting = self.tokens.to(lm.device), self.predicting.to(lm.device)
        pieces = [slice(None)] if together else slices(tokens.shape[0], tokens.shape[1], BATCH_TOKENS)
        return torch.cat([lm.hidden_states(tokens[piece], use_cache=False)[predicting[piece]] for piece in pieces])
