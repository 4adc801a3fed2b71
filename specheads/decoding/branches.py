"""Drafts that branch off from given texts: grown and read in batches on the KV cache of one
forward pass over each text.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from specheads.decoding.engine import EagerEngine, WholeTexts, cache_of, packed_reader
from specheads.decoding.engine.reading import branches_reading
from specheads.load import adapt_threads
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import SLICE_ELEMENTS, batches_of_tokens, right_padded
from specheads.pair.pair import Pair
from specheads.pair.reading import read_features, whole_states

# Of the draft's memory of branches that are drafted together, unless a caller asks for more
GROWN_BYTES = 2**26
MOST_NODES = 2048  # tokens of branches of one text that are in memory at once
# Of all branches that are drafted together; a pass over more takes longer per branch only
LOGITS_ELEMENTS = 4 * SLICE_ELEMENTS


@dataclass(frozen=True)
class Branches:
    """Drafts that branch off from texts: each continues the first tokens of one text."""

    text: Tensor  # (B,) long, the row of the text
    prefix: Tensor  # (B,) long, how many of its tokens come before the draft
    tokens: Tensor  # (B, K) long
    lengths: Tensor  # (B,) long, how many of `tokens` exist

    def to(self, device: torch.device) -> "Branches":
        return Branches(*(value.to(device) for value in vars(self).values()))

    def rows(self, rows: slice) -> "Branches":
        return Branches(*(value[rows] for value in vars(self).values()))

    @property
    def used(self) -> Tensor:
        """(B, K) bool, which of `tokens` exist."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


# Returns the next tokens (b,) of branches from their rows (b,), the depth of these tokens, and the
# states (b, H) that predict them
Draw = Callable[[Tensor, int, Tensor], Tensor]


@dataclass(frozen=True)
class ReadTexts:
    """Texts that a model has read: its KV cache of them, and the states (T, N, H) after each of
    their tokens.
    """

    engine: EagerEngine | WholeTexts
    hidden: Tensor
    # Of a draft that reads its target: the target's states (T, N, H_target), and its own
    # (T, N, H), which a step after each of the tokens reads
    of_target: Tensor | None = None
    own: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, lm: LanguageModel, tokens: Tensor) -> "ReadTexts":
        """Read `tokens` (T, N) long; padding after a row's end has no effect on the row."""
        if cache_of(lm).obstacle is not None:
            return cls(WholeTexts(lm, tokens), whole_states(lm, tokens))
        engine = EagerEngine(packed_reader(lm), tokens.shape[1], num_rows=len(tokens))
        return cls(engine, engine.forward(tokens.to(lm.device), num_logits=0).hidden)

    @classmethod
    @torch.no_grad()
    def of_draft(cls, pair: Pair, tokens: Tensor) -> "ReadTexts":
        """Read `tokens` (T, N) long by a pair's draft, and by its target if the draft reads that:
        the state after a token is then that of a round's first step, zeros after the first token.
        """
        lm = pair.draft_lm
        if not lm.reads_layers:
            return cls.of(lm, tokens)
        draft: Any = lm.model
        tokens = nn.functional.pad(tokens, (0, max(0, 2 - tokens.shape[1])))
        of_target, features = read_features(pair.target_lm, tokens, lm.reads_layers)
        engine = EagerEngine(lm, tokens.shape[1], num_rows=len(tokens))
        states = draft.first_states(features[:, :-1].to(draft.fc.weight))
        read = draft(tokens[:, 1:].to(lm.device), states, past_key_values=engine.cache)
        hidden, own = (nn.functional.pad(part, (0, 0, 1, 0)) for part in read)
        return cls(engine, hidden, of_target, own)

    @torch.no_grad()
    def grow(
        self,
        begun: Branches,
        width: int,
        draw: Draw,
        stops: Collection[int],
        num_positions: int,
        advance: Callable[[float], object] = lambda share: None,
    ) -> Branches:
        """Return branches that grow from their first tokens to their lengths, `width` at most, or
        to one of the tokens `stops`.

        Branches `begun` have their first tokens (B, 1); `draw` chooses the others. Those of similar
        size are drafted together, in `num_positions` of memory. `advance` is called with the share
        of the work that is done since the last call.
        """
        count = len(begun.lengths)
        if not count:
            advance(1.0)
        lm = self.engine.lm
        tokens = begun.tokens.new_zeros((count, width))
        tokens[:, :1] = begun.tokens
        lengths = begun.lengths.clone()
        ends = torch.tensor(sorted(stops), dtype=torch.long, device=tokens.device)
        most_rows = max(1, LOGITS_ELEMENTS // lm.vocab_size)
        bytes_per_position = self.engine.memory_bytes / self.hidden.shape[:2].numel()
        num_positions = max(num_positions, int(GROWN_BYTES / bytes_per_position))
        batches = batches_of_tokens((begun.prefix + width).tolist(), num_positions)
        for rows in (
            part
            for batch in batches
            for part in torch.tensor(batch, device=tokens.device).split(most_rows)
        ):
            prefix = begun.prefix[rows]
            fork, mask = self._fork(begun.text[rows], prefix, width)
            share = len(rows) / count
            steps = 0
            for depth in range(1, int(lengths[rows].max())):
                adapt_threads()
                ended = torch.isin(tokens[rows, depth - 1], ends)
                lengths[rows] = torch.where(ended, lengths[rows].clamp_max(depth), lengths[rows])
                if int(lengths[rows].max()) <= depth:
                    break
                mask = nn.functional.pad(mask, (0, 1), value=1)
                positions = (prefix + depth - 1 - lm.num_skipped)[:, None]
                output = fork.forward(
                    tokens[rows, depth - 1, None],
                    positions=positions,
                    attention_mask=mask,
                    num_logits=0,
                )
                tokens[rows, depth] = draw(rows, depth, output.hidden[:, -1])
                advance(share / width)
                steps += 1
            advance(share - share * steps / width)
            del fork  # before the next one is allocated
        return replace(begun, tokens=tokens, lengths=lengths)

    def _fork(
        self, rows: Tensor, prefix: Tensor, width: int
    ) -> tuple[EagerEngine | WholeTexts, Tensor]:
        """Return what goes on after the first `prefix` (b,) tokens of texts `rows` (b,) by up to
        `width` tokens, and its mask.
        """
        fork, mask = self.engine.fork(rows, prefix - self.engine.lm.num_skipped, width)
        if self.own is not None:
            assert isinstance(fork, EagerEngine)
            fork.carried_states[:, fork.length] = self.own[rows, prefix - 1]
        return fork, mask


class TextReader:
    """Reads one text after another, and all tokens of drafts that branch off from it together, on
    one memory without copies.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self._is_static = cache_of(lm).obstacle is None
        self.lm = packed_reader(lm) if self._is_static else lm
        self._text: Sequence[int] = ()
        self._engine: EagerEngine | None = None
        self.hidden = torch.empty(0)  # (N, H), the states after each token of the text
        # Of the branches' tokens in memory: branch, prefix and depth
        self._written = torch.empty(3, 0, dtype=torch.long)

    @torch.no_grad()
    def read(self, text: Sequence[int]) -> Tensor:
        """Read another text of N tokens; return the states (N, H) after each of them."""
        if not self._is_static:
            self._text, self.hidden = text, whole_states(self.lm, torch.tensor([list(text)]))[0]
            return self.hidden
        if self._engine is None or self._engine.capacity < len(text):
            self._engine = EagerEngine(self.lm, 1 << (len(text) - 1).bit_length(), MOST_NODES)
        tokens = torch.tensor([list(text)], device=self.lm.device)
        self.hidden = self._engine.read_row(0, tokens).hidden[0]
        self.forget_branches()
        return self.hidden

    def forget_branches(self) -> None:
        """Make place for the tokens of other branches of the text, MOST_NODES at most."""
        self._written = torch.empty(3, 0, dtype=torch.long, device=self.lm.device)

    @torch.no_grad()
    def states(self, branches: Branches, row: Tensor, depth: Tensor) -> Tensor:
        """Return the states (n, H) that the tokens at `depth` (n,) of the branches `row` (n,) are
        sampled from.

        The token before each of them is read by this call; those before that one must be among
        these, or of an earlier call.
        """
        if not self._is_static:
            return self._whole_states(branches, row, depth)
        assert self._engine is not None  # a text was read
        states = self.hidden[branches.prefix[row] - 1]
        later = depth > 0
        row = row[later]
        depth = depth[later] - 1
        if not len(row):
            return states
        length = len(self.hidden) + self._written.shape[1]
        self._written = torch.cat(
            [self._written, torch.stack([row, branches.prefix[row], depth])], dim=1
        )
        branch, prefix, place = self._written
        reading = branches_reading(self.lm, len(self.hidden), branch, prefix, place, len(row))
        read = self._engine.read_row(0, branches.tokens[row, depth][None], length, reading)
        states[later] = read.hidden[0].to(states)
        return states

    def _whole_states(self, branches: Branches, row: Tensor, depth: Tensor) -> Tensor:
        """Return what `states` does, by reading the text again with each of the branches."""
        if not len(row):
            return self.hidden[:0]
        numbers, place = row.unique(return_inverse=True)
        branch = zip(
            branches.prefix[numbers].tolist(), branches.tokens[numbers].tolist(), strict=True
        )
        texts = [[*self._text[:prefix], *tokens] for prefix, tokens in branch]
        return whole_states(self.lm, right_padded(texts))[place, branches.prefix[row] + depth - 1]
