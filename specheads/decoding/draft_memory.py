"""The tensors in which chains are drafted and verified."""

import torch
from torch import Tensor

from specheads.decoding.engine import StepMemory


class DraftMemory(StepMemory):
    """Drafted tokens and their distributions of R rows, in the same tensors every round: a draft is valid until the next one.

    Without `rows`, methods are about the first row.
    """

    sequence: Tensor
    probs: Tensor

    def __init__(self, most: int, vocab_size: int, dtype: torch.dtype, device: torch.device, num_rows: int = 1) -> None:
        """Allocate for `most` tokens, one distribution more, and the committed token that verification reads first."""
        super().__init__()
        self.most = most
        # One token more: a step that is run for its distribution alone writes one, too.
        self.register_buffer("sequence", torch.zeros(num_rows, most + 2, dtype=torch.long, device=device))
        self.register_buffer("probs", torch.zeros(num_rows, most + 1, vocab_size, dtype=dtype, device=device))
        self._numbers = self.sequence.numpy() if device.type == "cpu" else None
        self._tree_probs: Tensor | None = None
        # Made once: making a view costs as much as a copy.
        self.indices = torch.arange(most + 1, device=device).split(1)
        self._inputs = self.sequence[:1].split(1, dim=1)
        self._starts: dict[int, Tensor] = {}

    def distributions(self, count: int) -> Tensor:
        """Return a tensor for the distributions (count, V) of a growing tree; drafters share it."""
        if self._tree_probs is None or len(self._tree_probs) < count:
            self._tree_probs = self.probs.new_zeros(count, self.probs.shape[-1])
        return self._tree_probs

    def write(self, index: Tensor, token: Tensor, probs: Tensor, rows: Tensor | None = None) -> None:
        """Write tokens (B,) and the distributions (B, V) they were sampled from at `index` (1,) of rows (B,), or of all rows."""
        if rows is None:
            self.sequence.index_copy_(1, index + 1, token[:, None])
            self.probs.index_copy_(1, index, probs[:, None])
        else:
            self.sequence[rows, index + 1] = token
            self.probs[rows, index] = probs.to(self.probs.dtype)

    def set_last(self, token: int) -> None:
        """Set the committed token that verification reads first."""
        if self._numbers is None:
            self._inputs[0].fill_(token)
        else:
            self._numbers[0, 0] = token

    def drafted(self, index: int) -> Tensor:
        """Return the token (1, 1) at `index`."""
        return self._inputs[index + 1]

    def start(self, count: int) -> Tensor:
        """Return the first `count` tokens (1, count), beginning with the committed one."""
        if count not in self._starts:
            self._starts[count] = self.sequence[:1, :count]
        return self._starts[count]

    def copy_(self, other: "DraftMemory", count: int) -> None:
        """Copy the first `count` tokens of each row of another memory, and one distribution more."""
        self.sequence[:, 1 : count + 1] = other.sequence[:, 1 : count + 1]
        self.probs[:, : count + 1] = other.probs[:, : count + 1]
