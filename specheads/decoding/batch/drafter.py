"""Chains of several rows, drafted in lockstep: each step drafts one token in every row whose draft has not ended."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from specheads.decoding.batch.rows import Row, RowsExample, filled, flat_tokens
from specheads.decoding.batch.steps import RowsChainStep, with_rows
from specheads.decoding.drafting.autoregressive import ChainState, ChainStep
from specheads.decoding.engine import Engine


class RowsDrafter:
    """Drafts chains into the rows of a memory. It owns the stopping rule's state."""

    def __init__(self, engine: Engine, step: ChainStep, num_rows: int) -> None:
        """`num_rows`: rows that decode; memory and state have one more."""
        self._engine, self._step, self.rule = engine, engine.rows_step(RowsChainStep(step)), step.rule
        self.num_rows = self._spare_row = num_rows
        self._memory, device = step.memory, engine.lm.device
        self._going, self._stopped = (torch.full((num_rows + 1,), value, device=device) for value in (False, True))
        self.state: Any = self.rule.start_prompt(num_rows + 1, device)

    def warm_up(self, ends: Tensor) -> None:
        """Prepare the engine for all that drafting runs."""
        examples, state = [], ChainState(self._going, self.state)
        for many in (False, True):
            example = RowsExample(self._engine, [ends, *tree_leaves(state), *self._memory.buffers()], many)
            last, rows, index = (example.zeros(example.num_rows) for _ in range(3))
            examples.append(example.arguments(last, rows, index, last.double(), ends, state))
        self._engine.warm_up_rows(self._step, examples)

    def start(self, rows: Sequence[Row]) -> None:
        """Begin other prompts in some rows of the memory."""
        device = self._going.device
        places = torch.tensor([row.row for row in rows], device=device)
        self.state = with_rows(self.state, places, self.rule.start_prompt(len(rows), device))

    def draft(self, rows: Sequence[Row], ends: Tensor, most: int) -> None:
        """Draft up to `most` tokens after the committed ones of each row; the result is in the rows and in the memory."""
        state = ChainState(self._going, self.state)
        for row in rows:
            row.begin_round()
        drafting = [row for row in rows if min(row.limit, most) > 0]
        while drafting:
            drawn, state = self._step_rows(drafting, ends, state)
            for row, (token, _) in zip(drafting, drawn, strict=True):
                row.drafted.append(token)
                row.num_drafted += 1
            drafting = [
                row
                for row, (_, stopped) in zip(drafting, drawn, strict=True)
                if not stopped and len(row.drafted) < min(row.limit, most)
            ]
        waiting = [row for row in rows if row.num_probs_needed > len(row.drafted)]
        if waiting:  # only the distributions matter, the state stays as it is
            _, state = self._step_rows(waiting, ends, ChainState(self._stopped, state.rule))
            for row in waiting:
                row.session.draft_uniforms.give_back(1)
        self.state = state.rule

    def _step_rows(self, rows: Sequence[Row], ends: Tensor, state: ChainState) -> tuple[list[list[int]], ChainState]:
        """Run one step; return each row's token and whether its draft ends with it, and the new state."""
        device, least = ends.device, self._engine.padded_rows(len(rows))
        unread = [row.unread for row in rows]
        numbers, starts = [row.row for row in rows], [row.num_read for row in rows]
        flat = flat_tokens(numbers, unread, starts, self._engine.padded_rows(sum(map(len, unread))), self._spare_row, device)
        index = np.array([len(row.drafted) for row in rows])
        uniform = np.array([row.session.draft_uniforms.number() for row in rows])
        packed, state = self._step(
            flat.tokens,
            flat.end,
            flat.places,
            filled(flat.first + flat.counts - 1, least, 0, device),
            filled(np.array(numbers), least, self._spare_row, device),
            filled(index, least, 0, device),
            filled(uniform, least, 0.0, device),
            ends,
            state,
        )
        for row, tokens in zip(rows, unread, strict=True):
            row.num_read += len(tokens)
            row.num_draft_calls += 1
        return packed.tolist()[: len(rows)], state

    def keep(self, row: Row, num_accepted: int) -> None:
        """Forget what a row's draft has read beyond the accepted tokens. Call it before they are committed."""
        row.num_read = min(row.num_read, len(row.session.committed) + num_accepted)
