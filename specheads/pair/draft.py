"""What a draft is to labels, training and replay, which read it along given texts.

Ordinary drafts (`LanguageModel`) read tokens alone. A draft that also reads states of its target
says of which layers, and `specheads.pair.reading` hands them over.
"""

from typing import Protocol

import torch
from torch import Tensor


class DraftModel(Protocol):
    """A model that proposes tokens, in two steps: texts -> hidden states -> logits."""

    # The layers of the target whose inputs (B, T, H) it reads; input i is what transformers calls
    # `hidden_states[i]`. None: ().
    reads_layers: tuple[int, ...]
    vocab_size: int

    @property
    def device(self) -> torch.device:
        """Device of inputs and outputs."""

    @property
    def hidden_size(self) -> int:
        """Size H of the hidden states, which heads read."""

    @property
    def kept_tokens(self) -> Tensor | None:
        """The tokens (V_kept,) long that it can propose, ascending; None: all V."""

    def states_along(self, tokens: Tensor, target_layers: Tensor | None = None) -> Tensor:
        """Return the hidden states (B, T, H) after each of `tokens` (B, T) of right-padded texts.

        `target_layers`: (B, T, len(reads_layers) H_target); None if it reads none.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V), float32 or wider, of hidden states (..., H)."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings (..., E) of `tokens` (...)."""
