"""The target's forward pass over the chains of all rows and their verification, in one compiled step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.engine import Engine, ForwardOutput
from specheads.decoding.rows import Row
from specheads.decoding.step_inputs import DraftMemory, HostNumbers, RowsExample, RowsStep
from specheads.decoding.verification import Block, VerificationRule
from specheads.pair.sampling import Warp, has_nan


class StepResult(NamedTuple):
    """What the host reads after a verification."""

    num_accepted: int
    next_token: int
    draft_nan: bool
    target_nan: bool
    draft_tokens: Sequence[int]  # padding included

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> "StepResult":
        """Return the result that a VerifyStep packed into one tensor."""
        num_accepted, next_token, draft_nan, target_nan, *draft_tokens = numbers
        return cls(num_accepted, next_token, bool(draft_nan), bool(target_nan), draft_tokens)


class VerifyStep:
    """The epilogue of a verification's forward pass. An engine may compile it."""

    def __init__(self, warp: Warp, rule: VerificationRule, memory: DraftMemory) -> None:
        self.warp, self.rule, self.memory = warp, rule, memory
        self.compile_key = (VerifyStep, warp, rule.compile_key, memory)

    def __call__(self, output: ForwardOutput, uniforms: Tensor, lengths: Tensor) -> Tensor:
        """Return a packed StepResult (1, 4 + K) long after a pass over the last committed token and K drafted ones."""
        draft_tokens = output.tokens[:, 1:]
        draft_probs = self.memory.probs[:, : draft_tokens.shape[1]]
        return self.decide(draft_tokens, draft_probs, self.warp(output.logits), uniforms[None], lengths)

    def decide(
        self, draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return packed StepResults (B, 4 + K) long of a Block; what lies beyond the length of a draft does not matter.

        `uniforms` (B, 2) are for the number of accepted tokens and for the target's token.
        """
        block = Block.of(draft_tokens, draft_probs, target_probs, lengths)
        verdict = self.rule.distribution(block).decide(uniforms[:, 0], uniforms[:, 1])
        nans = [(has_nan(draft_probs) & block.within).any(dim=1).long(), has_nan(target_probs).any(dim=1).long()]
        return torch.cat([torch.stack([verdict.num_accepted, verdict.next_token, *nans], dim=1), draft_tokens], dim=1)


class _RowsVerifyStep:
    """The epilogue of a verification's forward pass over the drafts of some rows."""

    open_inputs = ((0, 1), (0,), (0,), (0,))

    def __init__(self, step: VerifyStep) -> None:
        self.step = step
        self.compile_key = (_RowsVerifyStep, *step.compile_key)

    def __call__(self, output: ForwardOutput, index: Tensor, rows: Tensor, uniforms: Tensor, lengths: Tensor) -> Tensor:
        """Return packed StepResults (n, 4 + K) long for `rows` (n,) long of the memory; see `VerifyStep.decide`.

        `index` (n, K + 1) says where in the forward pass the last committed token and the drafted ones of each row are; after
        the last drafted one it is repeated.
        """
        memory, num_drafted = self.step.memory, index.shape[1] - 1
        draft_tokens = memory.sequence[rows, 1 : num_drafted + 1]
        draft_probs = memory.probs[rows, :num_drafted]
        target_probs = self.step.warp(output.logits[:, 0])[index]
        return self.step.decide(draft_tokens, draft_probs, target_probs, uniforms, lengths)


class ChainVerifier:
    """Verifies the chains in the rows of a memory."""

    def __init__(self, engine: Engine, step: VerifyStep, most: int) -> None:
        self.rule, self._engine, self.memory, self._most = step.rule, engine, step.memory, most
        self._single, device = engine.num_rows == 1, engine.lm.device
        self.step: Any = engine.compiled_step(step, all_logits=True) if self._single else RowsStep(engine, _RowsVerifyStep(step))
        self._length = HostNumbers((1,), device)  # a single row's number of drafted tokens

    def warm_up(self) -> None:
        engine = self._engine
        if self._single:
            counts = sorted({engine.padded(count) for count in range(1, engine.padded(self._most + 1) + 1)})
            uniforms = torch.zeros(2, dtype=torch.float64, device=engine.lm.device)
            engine.warm_up(self.step, counts, uniforms, self._length.tensor)
            return

        def inputs(example: RowsExample) -> tuple[Any, ...]:
            count, zeros = example.num_rows, example.zeros
            return zeros(count, example.num_columns), zeros(count), zeros(count, 2, dtype=torch.float64), zeros(count)

        self.step.warm_up(inputs, [*self.memory.buffers()], self.memory.most + 1)

    def verify(self, rows: Sequence[Row]) -> list[StepResult]:
        """Verify the draft of each row; return the outcomes."""
        return (self._verify_single if self._single else self._verify_rows)(rows)

    def _verify_single(self, rows: Sequence[Row]) -> list[StepResult]:
        row, engine, base, count = rows[0], self._engine, self._engine.length, rows[0].num_drafted
        self.memory.set_last(row.committed[-1])
        self._length.numbers[0] = count
        self._length.send()
        tokens = self.memory.start(engine.padded(count + 1))
        packed = self.step(tokens, row.verify_uniforms.take(2), self._length.tensor)
        result = StepResult.unpacked(packed.tolist()[0])
        engine.rewind(base + 1 + result.num_accepted)
        return [result]

    def _verify_rows(self, rows: Sequence[Row]) -> list[StepResult]:
        tokens, starts = [[row.committed[-1], *row.drafted] for row in rows], [len(row.committed) - 1 for row in rows]
        flat = self.step.flat([row.place for row in rows], tokens, starts)
        drafted = flat.counts - 1
        width = self._engine.padded_rows(int(drafted.max()) + 1)
        index = flat.first[:, None] + np.minimum(np.arange(width), drafted[:, None])
        uniforms = np.array([[row.verify_uniforms.number() for _ in range(2)] for row in rows])
        packed = self.step(flat, [index, flat.rows, uniforms, drafted])
        return [StepResult.unpacked(each) for each in packed.tolist()[: len(rows)]]
