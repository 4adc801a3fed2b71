"""Samples as tensors, and the states of a model along them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specheads.padding import BATCH_TOKENS, slices
from specheads.pair import LanguageModel
from specheads.training.distill.samples import Sample
from specheads.training.distill.target_store import padded


@dataclass(frozen=True)
class Texts:
    """Samples as tensors: `tokens` (B, T), zeros behind their ends, and `judged` (B, T) bool, the places that the N learnt tokens come from."""

    tokens: Tensor
    judged: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> "Texts":
        texts = [np.concatenate([sample.prompt, sample.response]) for sample in samples]
        tokens, judged = padded(texts, [len(sample.prompt) for sample in samples])
        return cls(tokens.to(device), judged.to(device))

    @property
    def learnt(self) -> Tensor:
        """The texts' own tokens (N,) at the learnt places."""
        return self.tokens[:, 1:][self.judged[:, :-1]]

    def states(self, lm: LanguageModel) -> Tensor:
        """Return a model's states (N, H) that the learnt tokens come from, on its device."""
        tokens, judged = self.tokens.to(lm.device), self.judged.to(lm.device)
        pieces = slices(*tokens.shape, BATCH_TOKENS)
        return torch.cat([lm.hidden_states(tokens[piece], use_cache=False)[judged[piece]] for piece in pieces])
