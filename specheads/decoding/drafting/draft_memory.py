"""The tensors in which chains are drafted and verified."""

import torch
from torch import Tensor

from specheads.language_model import LanguageModel


class DraftMemory:
    """Drafted tokens and their distributions, in the same tensors every round: a draft is valid until the next one."""

    def __init__(self, most: int, lm: LanguageModel, device: torch.device) -> None:
        """Allocate for `most` tokens, one distribution more, and the committed token that verification reads first."""
        self.sequence = torch.zeros(1, most + 1, dtype=torch.long, device=device)
        self.tokens = self.sequence[0, 1:]
        self.probs = torch.zeros(most + 1, lm.vocab_size, dtype=lm.probs_dtype, device=device)
        self._probs: Tensor | None = None
        # Views made once: making one costs as much as a copy.
        self._rows = list(zip(self.tokens.split(1), self.probs.split(1), strict=False))

    def distributions(self, count: int) -> Tensor:
        """Return a tensor for the distributions (count, V) of a growing tree; drafters share it."""
        if self._probs is None or len(self._probs) < count:
            self._probs = self.probs.new_zeros(count, self.probs.shape[1])
        return self._probs

    def write(self, index: int, token: Tensor, probs: Tensor) -> None:
        """Write the token (1,) at `index` and the distribution (1, V) it was sampled from."""
        token_row, probs_row = self._rows[index]
        token_row.copy_(token)
        probs_row.copy_(probs)

    def copy_(self, other: "DraftMemory", count: int) -> None:
        """Copy the first `count` tokens of another memory and one distribution more."""
        self.tokens[:count] = other.tokens[:count]
        self.probs[: count + 1] = other.probs[: count + 1]
