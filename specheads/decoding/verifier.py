"""The target's forward pass over the chains of all rows and their verification, in one compiled step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from specheads.decoding.engine import Engine, ForwardOutput
from specheads.decoding.rows import Row
from specheads.decoding.step_inputs import DraftMemory, HostNumbers, RowsExample, RowsStep, of_rows, with_rows
from specheads.decoding.verification import Block, VerificationRule
from specheads.pair.sampling import Warp, has_nan


class StepResult(NamedTuple):
    """What the host reads after a verification."""

    num_accepted: int
    next_token: int
    num_probs_needed: int
    draft_nan: bool
    target_nan: bool
    draft_tokens: Sequence[int]  # padding included

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> "StepResult":
        """Return the result that a VerifyStep packed into one tensor."""
        num_accepted, next_token, num_probs_needed, draft_nan, target_nan, *draft_tokens = numbers
        return cls(num_accepted, next_token, num_probs_needed, bool(draft_nan), bool(target_nan), draft_tokens)


class VerifyStep:
    """The epilogue of a verification's forward pass. An engine may compile it."""

    def __init__(self, warp: Warp, rule: VerificationRule, memory: DraftMemory) -> None:
        """`memory`: in which drafts come."""
        self.warp, self.rule, self.memory = warp, rule, memory
        self.compile_key = (VerifyStep, warp, rule.compile_key, memory)

    def __call__(self, output: ForwardOutput, uniforms: Tensor, lengths: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return a packed StepResult (1, 5 + K) long and the rule's new state.

        The forward pass read the last committed token and K drafted ones; `decide` describes `uniforms` (2,) and `lengths` (3,).
        """
        draft_tokens = output.tokens[:, 1:]
        draft_probs = self.memory.probs[:, : draft_tokens.shape[1] + int(self.rule.reads_next_probs)]
        target_probs = self.warp(output.logits)
        return self.decide(draft_tokens, draft_probs, target_probs, uniforms[None], lengths[None], state)

    def decide(
        self, draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor, lengths: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        """Return packed StepResults (B, 5 + K) long and the rule's new state.

        Args:
            draft_tokens, draft_probs, target_probs: see Block; those beyond the length of a draft do not matter.
            uniforms: (B, 2), for the number of accepted tokens and for the target's token.
            lengths: (B, 3) long: the drafted tokens, the planned ones (see Block), and the draft's distributions.
        """
        num_drafted, planned, num_probs = lengths.unbind(dim=1)
        block = Block.of(draft_tokens, draft_probs, target_probs, num_drafted, planned)
        verdict, state = self.rule(state, block, uniforms[:, 0], uniforms[:, 1])
        num_probs_needed = verdict.num_probs_needed
        if num_probs_needed is None:
            num_probs_needed = torch.zeros_like(verdict.num_accepted)
        written = torch.arange(draft_probs.shape[1], device=lengths.device) < num_probs[:, None]
        nans = [(has_nan(draft_probs) & written).any(dim=1).long(), has_nan(target_probs).any(dim=1).long()]
        numbers = torch.stack([verdict.num_accepted, verdict.next_token, num_probs_needed, *nans], dim=1)
        return torch.cat([numbers, draft_tokens], dim=1), state


class _RowsVerifyStep:
    """The epilogue of a verification's forward pass over the drafts of some rows."""

    open_inputs = ((0, 1), (0,), (0,), (0,))

    def __init__(self, step: VerifyStep) -> None:
        self.step = step
        self.compile_key = (_RowsVerifyStep, *step.compile_key)

    def __call__(
        self, output: ForwardOutput, index: Tensor, rows: Tensor, uniforms: Tensor, lengths: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        """Return packed StepResults (n, 5 + K) long and the rule's state.

        Args:
            index: (n, K + 1) long, where in the forward pass the last committed token and the drafted ones of each row are; after
                the last drafted one it is repeated.
            rows: (n,) long, rows of the memory and of the state.
            uniforms, lengths: (n, 2) and (n, 3); see `VerifyStep.decide`.
            state: of all rows.
        """
        memory, num_drafted = self.step.memory, index.shape[1] - 1
        draft_tokens = memory.sequence[rows, 1 : num_drafted + 1]
        draft_probs = memory.probs[rows, : num_drafted + int(self.step.rule.reads_next_probs)]
        target_probs = self.step.warp(output.logits[:, 0])[index]
        packed, new = self.step.decide(draft_tokens, draft_probs, target_probs, uniforms, lengths, of_rows(state, rows))
        return packed, with_rows(state, rows, new)


class ChainVerifier:
    """Verifies the chains in the rows of a memory. It owns the verification rule's state."""

    def __init__(self, engine: Engine, step: VerifyStep, most: int) -> None:
        """Make its step; `most` is the length of the longest chain."""
        self.rule, self._engine, self.memory, self._most = step.rule, engine, step.memory, most
        self._single, device = engine.num_rows == 1, engine.lm.device
        self.step: Any = engine.compiled_step(step, all_logits=True) if self._single else RowsStep(engine, _RowsVerifyStep(step))
        self._lengths = HostNumbers((3,), device)  # a single row's numbers
        self.state: Any = self.rule.start_prompt(engine.num_rows, device)

    def warm_up(self) -> None:
        """Prepare the engine for all that verification runs."""
        engine = self._engine
        if self._single:
            counts = sorted({engine.padded(count) for count in range(1, engine.padded(self._most + 1) + 1)})
            uniforms = torch.zeros(2, dtype=torch.float64, device=engine.lm.device)
            engine.warm_up(self.step, counts, uniforms, self._lengths.tensor, self.state)
            return

        def inputs(example: RowsExample) -> tuple[Any, ...]:
            count, zeros = example.num_rows, example.zeros
            numbers = zeros(count, 2, dtype=torch.float64), zeros(count, 3)
            return zeros(count, example.num_columns), zeros(count), *numbers, self.state

        self.step.warm_up(inputs, [*tree_leaves(self.state), *self.memory.buffers()], self.memory.most + 1)

    def start(self, rows: Sequence[Row]) -> None:
        """Begin other prompts in some rows of the memory."""
        new = self.rule.start_prompt(len(rows), self._engine.lm.device)
        self.state = new if self._single else with_rows(self.state, [row.place for row in rows], new)

    def verify(self, rows: Sequence[Row], planned: Sequence[int]) -> list[StepResult]:
        """Verify the draft of each row; return the outcomes.

        Args:
            planned: tokens that each row would have drafted whatever they are; 0: their number depends on them.
        """
        return (self._verify_single if self._single else self._verify_rows)(rows, planned)

    def _verify_single(self, rows: Sequence[Row], planned: Sequence[int]) -> list[StepResult]:
        row, engine, base, count = rows[0], self._engine, self._engine.length, rows[0].num_drafted
        self.memory.set_last(row.committed[-1])
        self._lengths.numbers[:] = count, planned[0], count + row.has_next_probs
        self._lengths.send()
        tokens = self.memory.start(engine.padded(count + 1))
        packed, self.state = self.step(tokens, row.verify_uniforms.take(2), self._lengths.tensor, self.state)
        result = StepResult.unpacked(packed.tolist()[0])
        engine.rewind(base + 1 + result.num_accepted)
        return [result]

    def _verify_rows(self, rows: Sequence[Row], planned: Sequence[int]) -> list[StepResult]:
        tokens, starts = [[row.committed[-1], *row.drafted] for row in rows], [len(row.committed) - 1 for row in rows]
        flat = self.step.flat([row.place for row in rows], tokens, starts)
        drafted = flat.counts - 1
        width = self._engine.padded(int(drafted.max()) + 1)
        index = flat.first[:, None] + np.minimum(np.arange(width), drafted[:, None])
        uniforms = np.array([[row.verify_uniforms.number() for _ in range(2)] for row in rows])
        lengths = np.stack([drafted, planned, drafted + [row.has_next_probs for row in rows]], axis=1)
        packed, self.state = self.step(flat, [index, flat.rows, uniforms, lengths], self.state)
        return [StepResult.unpacked(each) for each in packed.tolist()[: len(rows)]]
