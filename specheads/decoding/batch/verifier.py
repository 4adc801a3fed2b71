"""The verification of several rows: one forward pass over the last committed and all drafted tokens, then the rule."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from specheads.decoding.batch.rows import Row, RowsExample, filled, flat_tokens
from specheads.decoding.batch.steps import RowsVerifyStep, with_rows
from specheads.decoding.engine import Engine
from specheads.decoding.verification import VerifyStep
from specheads.decoding.verification.verify_step import StepResult


class RowsVerifier:
    """Verifies the chains in the rows of a memory. It owns the verification rule's state."""

    def __init__(self, engine: Engine, step: VerifyStep, num_rows: int) -> None:
        """`num_rows`: rows that decode; memory and state have one more."""
        self._engine, self._step, self.rule, self._spare_row = engine, engine.rows_step(RowsVerifyStep(step)), step.rule, num_rows
        self._memory = step.memory
        self.state: Any = self.rule.start_prompt(num_rows + 1, engine.lm.device)

    def warm_up(self) -> None:
        """Prepare the engine for all that verification runs."""
        examples = []
        for many in (False, True):
            others = [*tree_leaves(self.state), *self._memory.buffers()]
            example = RowsExample(self._engine, others, many, self._memory.most + 1)
            count = example.num_rows
            numbers = example.zeros(count, 2, dtype=torch.float64), example.zeros(count, 3)
            inputs = example.zeros(count, example.num_columns), example.zeros(count), *numbers, self.state
            examples.append(example.arguments(*inputs))
        self._engine.warm_up_rows(self._step, examples)

    def start(self, rows: Sequence[Row]) -> None:
        """Begin other prompts in some rows of the memory."""
        device = self._engine.lm.device
        places = torch.tensor([row.row for row in rows], device=device)
        self.state = with_rows(self.state, places, self.rule.start_prompt(len(rows), device))

    def verify(self, rows: Sequence[Row], planned: Sequence[int]) -> tuple[list[StepResult], Tensor]:
        """Verify the draft of each row; return the outcomes, and the target's states (n, H) that next tokens were decided from.

        Args:
            planned: tokens that each row would have drafted whatever they are; 0: their number depends on them.
        """
        engine, device = self._engine, self._engine.lm.device
        tokens = [[row.session.committed[-1], *row.drafted] for row in rows]
        numbers, starts = [row.row for row in rows], [len(row.session.committed) - 1 for row in rows]
        flat = flat_tokens(numbers, tokens, starts, engine.padded_rows(sum(map(len, tokens))), self._spare_row, device)
        num_drafted = flat.counts - 1
        width = engine.padded(int(num_drafted.max()) + 1)
        index = flat.first[:, None] + np.minimum(np.arange(width), num_drafted[:, None])
        # One more where the draft's distribution after its last token was needed; a policy may have dropped tokens.
        num_probs = [len(row.drafted) + (row.num_draft_calls > row.num_drafted) for row in rows]
        lengths = np.stack([num_drafted, np.array(planned), np.array(num_probs)], axis=1)
        uniforms = np.array([[row.session.verify_uniforms.number() for _ in range(2)] for row in rows])
        least = engine.padded_rows(len(rows))
        packed, hidden, self.state = self._step(
            flat.tokens,
            flat.end,
            flat.places,
            filled(index, least, 0, device),
            filled(np.array(numbers), least, self._spare_row, device),
            filled(uniforms, least, 0.0, device),
            filled(lengths, least, 0, device),
            self.state,
        )
        return [StepResult.unpacked(each) for each in packed.tolist()[: len(rows)]], hidden[: len(rows)]
