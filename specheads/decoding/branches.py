"""Drafts that branch off from given texts: grown and read in batches on the KV memory of one forward pass over each text.

Recordings need drafts that start within a text; reading the text again for every such draft would cost many times as much.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.decoding.engine import EagerEngine
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import SLICE_ELEMENTS, batches_of_tokens
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, check_finite

LOGITS_ELEMENTS = 4 * SLICE_ELEMENTS  # of all branches that are drafted together; a pass over more takes longer per branch only


@dataclass(frozen=True)
class Branches:
    """Drafts that branch off from texts: each continues the first tokens of one text."""

    text: Tensor  # (B,) long, the row of the text
    prefix: Tensor  # (B,) long, how many of its tokens come before the draft
    tokens: Tensor  # (B, K) long
    lengths: Tensor  # (B,) long, how many of `tokens` exist

    def to(self, device: torch.device) -> "Branches":
        """Return the branches on a device."""
        return Branches(*(value.to(device) for value in vars(self).values()))

    def rows(self, rows: slice) -> "Branches":
        """Return some of the branches."""
        return Branches(*(value[rows] for value in vars(self).values()))

    @property
    def used(self) -> Tensor:
        """(B, K) bool, which of `tokens` exist."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


Seen = Callable[[Tensor, int, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class ReadTexts:
    """Texts that a model has read: its KV memory of them, and the states (T, N, H) after each of their tokens."""

    engine: EagerEngine
    hidden: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, lm: LanguageModel, tokens: Tensor) -> "ReadTexts":
        """Read `tokens` (T, N) long; padding after a row's end has no effect on the row."""
        engine = EagerEngine(lm, tokens.shape[1])
        return cls(engine, engine.forward(tokens.to(lm.device), num_logits=0).hidden)

    @torch.no_grad()
    def grow(
        self,
        pair: Pair,
        begun: Branches,
        uniform: Tensor,
        warp: Warp,
        num_positions: int,
        seen: Seen = lambda rows, depth, logits, probs, tokens: None,
    ) -> Branches:
        """Return branches that grow from their first tokens to their lengths, or to a token that ends a response.

        Args:
            begun: branches whose `tokens` are the first tokens, (B, 1).
            uniform: (B, K) in [0, 1), the numbers at which tokens are sampled; those of first tokens are not used.
            num_positions: of memory for the branches that are drafted together, of similar size; a single one may take more.
            seen: called with rows (b,), their depth, logits and probabilities (b, V) there and the sampled tokens (b,).
        """
        count, width = uniform.shape
        tokens = begun.tokens.new_zeros((count, width))
        tokens[:, :1] = begun.tokens
        lengths = begun.lengths.clone()
        stops = torch.tensor(sorted(pair.stop_tokens), dtype=torch.long, device=tokens.device)
        most_rows = max(1, LOGITS_ELEMENTS // pair.vocab_size)
        batches = batches_of_tokens((begun.prefix + width).tolist(), num_positions)
        for rows in (part for batch in batches for part in torch.tensor(batch, device=tokens.device).split(most_rows)):
            prefix = begun.prefix[rows]
            fork, mask = self.engine.fork(begun.text[rows], prefix, width)
            for depth in range(1, int(lengths[rows].max())):
                ended = torch.isin(tokens[rows, depth - 1], stops)
                lengths[rows] = torch.where(ended, lengths[rows].clamp_max(depth), lengths[rows])
                if int(lengths[rows].max()) <= depth:
                    break
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                positions = (prefix + depth - 1)[:, None]
                logits = fork.forward(tokens[rows, depth - 1, None], positions=positions, attention_mask=mask).logits[:, -1]
                probs = warp(logits)
                check_finite(pair.draft_id, probs)
                tokens[rows, depth] = warp.draw(probs, uniform[rows, depth])
                seen(rows, depth, logits, probs, tokens[rows, depth])
            del fork  # before the next one is allocated
        return replace(begun, tokens=tokens, lengths=lengths)

    @torch.no_grad()
    def states(self, branches: Branches, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows (b,) of branches and the states (b, k, H) that their tokens are sampled from; k is the largest length."""
        lm = self.engine.lm
        branches = branches.to(lm.device)
        before = self.hidden[branches.text, branches.prefix - 1]
        for rows in torch.arange(len(branches.prefix), device=lm.device).split(batch_size) if len(branches.prefix) else ():
            prefix, longest = branches.prefix[rows], int(branches.lengths[rows].max())
            states = before[rows, None]
            if longest > 1:
                fork, mask = self.engine.fork(branches.text[rows], prefix, longest - 1)
                positions = prefix[:, None] + torch.arange(longest - 1, device=lm.device)
                mask = torch.nn.functional.pad(mask, (0, longest - 1), value=1)
                read = branches.tokens[rows, : longest - 1]
                output = fork.forward(read, positions=positions, attention_mask=mask, num_logits=0)
                states = torch.cat([states, output.hidden], dim=1)
                del fork, output  # before the next ones are allocated
            yield rows, states
