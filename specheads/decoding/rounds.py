"""A round of all rows: chains and their verification, or one token of the target alone."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.engine import Engine, ForwardOutput
from specheads.decoding.records import Clock, Mark, Round
from specheads.decoding.rows import Rounds, Row
from specheads.decoding.step_inputs import (
    DraftMemory,
    HostNumbers,
    RowsExample,
    RowsStep,
    with_rows,
)
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.verification import Block, TokenVerification, VerificationRule
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, has_nan


class _TargetStep:
    """The epilogue of a forward pass of the target alone, over one token of each row."""

    open_inputs = ((0,),)

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.compile_key = (_TargetStep, warp)

    def __call__(self, output: ForwardOutput, uniform: Tensor) -> Tensor:
        """Return the next tokens and whether there was a NaN, (N, 2) long, drawn at `uniform`
        (N,).
        """
        probs = self.warp(output.logits[:, -1])
        return torch.stack([self.warp.draw(probs, uniform), has_nan(probs).long()], dim=1)


class RoundParts(NamedTuple):
    """What rounds are made of."""

    pair: Pair
    engines: Sequence[
        Engine
        # The target's, and the draft's if one is run; with memory of one text, or of rows and a
        # spare one
    ]
    stopping: StoppingRule
    verification: Any
    warp: Warp
    memory: DraftMemory  # holds the drafts, on the draft's device


class TargetRounds(Rounds):
    """One token of the target, or of another model that decodes alone, for each row."""

    def __init__(self, model_id: str, engine: Engine, warp: Warp) -> None:
        super().__init__((engine,))
        self._model_id = model_id
        step = _TargetStep(warp)
        self._single = engine.num_rows == 1
        self.step: Any = engine.compiled_step(step) if self._single else RowsStep(engine, step)
        self._last = HostNumbers((1, 1), engine.lm.device)

    def warm_up(self, ends: Tensor) -> None:
        engine = self.engines[0]
        if self._single:
            engine.warm_up(
                self.step, (1,), torch.zeros(1, dtype=torch.float64, device=engine.lm.device)
            )
        else:
            self.step.warm_up(
                lambda example: (example.zeros(example.num_tokens, dtype=torch.float64),)
            )

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[Round], Mark]:
        drafted = clock.mark()
        if self._single:
            self._last.numbers[0, 0] = rows[0].committed[-1]
            self._last.send()
            packed = self.step(self._last.tensor, rows[0].verify_uniforms.take(1))
        else:
            starts = [len(row.committed) - 1 for row in rows]
            flat = self.step.flat(
                [row.place for row in rows], [row.committed[-1:] for row in rows], starts
            )
            uniform = np.array([row.verify_uniforms.number() for row in rows])
            packed = self.step(flat, [uniform])
        rounds = []
        for row, (token, nan) in zip(
            rows, packed.tolist(), strict=False
        ):  # what follows filled the step up
            rounds.append(Round([token]))
            if nan:
                row.fail_by_nan(self._model_id)
        return rounds, drafted

    def repeated_step(self) -> Callable[[], object]:
        """Return a call that takes the step of a single row again and again, wherever memory ends."""
        device = self.engines[0].lm.device
        token = torch.zeros((1, 1), dtype=torch.long, device=device)
        uniform = torch.zeros(1, dtype=torch.float64, device=device)
        return lambda: self.step(token, uniform)


class StepResult(NamedTuple):
    """What the host reads after a verification."""

    num_accepted: int
    next_token: int
    draft_nan: bool
    target_nan: bool
    draft_tokens: Sequence[int]  # padding included

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> "StepResult":
        num_accepted, next_token, draft_nan, target_nan, *draft_tokens = numbers
        return cls(num_accepted, next_token, bool(draft_nan), bool(target_nan), draft_tokens)


class VerifyStep:
    """The epilogue of a verification's forward pass. An engine may compile it."""

    def __init__(self, warp: Warp, rule: VerificationRule, memory: DraftMemory) -> None:
        self.warp = warp
        self.rule = rule
        self.memory = memory
        self.compile_key = (VerifyStep, warp, rule.compile_key, memory)

    def __call__(self, output: ForwardOutput, uniforms: Tensor, lengths: Tensor) -> Tensor:
        """Return a packed StepResult (1, 4 + K) long after a pass over the last committed token and
        K drafted ones.
        """
        draft_tokens = output.tokens[:, 1:]
        draft_probs = self.memory.probs[:, : draft_tokens.shape[1]]
        return self.decide(
            draft_tokens, draft_probs, self.warp(output.logits), uniforms[None], lengths
        )

    def decide(
        self,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        uniforms: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """Return packed StepResults (B, 4 + K) long of a Block.

        What lies beyond the length of a draft does not matter.

        `uniforms` (B, 2) are for the number of accepted tokens and for the target's token.
        """
        block = Block.of(draft_tokens, draft_probs, target_probs, lengths)
        decision = self.rule.distribution(block).decide(uniforms[:, 0], uniforms[:, 1])
        nans = [
            (has_nan(draft_probs) & block.within).any(dim=1).long(),
            has_nan(target_probs).any(dim=1).long(),
        ]
        return torch.cat([torch.stack([*decision, *nans], dim=1), draft_tokens], dim=1)


class _RowsVerifyStep:
    """The epilogue of a verification's forward pass over the drafts of some rows."""

    open_inputs = ((0, 1), (0,), (0,), (0,))

    def __init__(self, step: VerifyStep) -> None:
        self.step = step
        self.compile_key = (_RowsVerifyStep, *step.compile_key)

    def __call__(
        self, output: ForwardOutput, index: Tensor, rows: Tensor, uniforms: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return packed StepResults (n, 4 + K) long for `rows` (n,) long of the memory.

        See `VerifyStep.decide`.

        `index` (n, K + 1) says where in the forward pass the last committed token and the drafted
        ones of each row are; after the last drafted one it is repeated.
        """
        memory = self.step.memory
        num_drafted = index.shape[1] - 1
        draft_tokens = memory.sequence[rows, 1 : num_drafted + 1]
        draft_probs = memory.probs[rows, :num_drafted]
        target_probs = self.step.warp(output.logits[:, 0])[index]
        return self.step.decide(draft_tokens, draft_probs, target_probs, uniforms, lengths)


class Drafter:
    """The base of what drafts chains in the rows of a memory. It owns the stopping rule's state."""

    def __init__(self, engine: Engine, rule: StoppingRule) -> None:
        self._engine = engine
        self.rule = rule
        self.state: Any = rule.start_prompt(
            engine.num_rows, engine.lm.device
        )  # a row's state is at its place in memory

    def warm_up(self, ends: Tensor) -> None:
        raise NotImplementedError

    def start(self, rows: Sequence[Row]) -> None:
        """Begin other prompts in some rows."""
        new = self.rule.start_prompt(len(rows), self._engine.lm.device)
        self.state = (
            new
            if self._engine.num_rows == 1
            else with_rows(self.state, [row.place for row in rows], new)
        )

    def draft(self, rows: Sequence[Row], ends: Tensor) -> None:
        """Draft up to the rule's most tokens for each row, into the row, and their distributions
        into memory.
        """
        raise NotImplementedError

    def keep(self, row: Row, num_accepted: int) -> None:
        """Forget what a row's draft has read beyond the accepted tokens.

        Call it before they are committed.
        """
        raise NotImplementedError

    def repeated_steps(self, count: int) -> Callable[[], None]:
        """Return a call that drafts `count` tokens of a single row, wherever memory ends, and ends
        no draft.
        """
        raise NotImplementedError


class ChainRounds(Rounds):
    """Chains, and one verification for those of all rows."""

    def __init__(self, parts: RoundParts, drafter: Drafter) -> None:
        super().__init__(parts.engines)
        self._pair = parts.pair
        target = parts.engines[0]
        memory = parts.memory
        self.drafter = drafter
        self.memory = memory
        self.verified_memory = memory
        if target.lm.device != memory.probs.device:
            lm = target.lm
            self.verified_memory = DraftMemory(
                memory.most, lm.vocab_size, lm.probs_dtype, lm.device, target.num_rows
            )
        self.verification = parts.verification
        self._target = target
        self._single = target.num_rows == 1
        step = VerifyStep(parts.warp, parts.verification, self.verified_memory)
        self.step: Any = (
            target.compiled_step(step, all_logits=True)
            if self._single
            else RowsStep(target, _RowsVerifyStep(step))
        )
        self._length = HostNumbers(
            (1,), target.lm.device
        )  # a single row's number of drafted tokens
        self._counts = HostNumbers(
            (2, target.num_rows), memory.probs.device
        )  # drafted and accepted tokens
        self._outcome = self._counts.tensor.unbind()

    def warm_up(self, ends: Tensor) -> None:
        self.drafter.warm_up(ends)
        target = self._target
        memory = self.verified_memory
        if self._single:
            most = target.padded(self.drafter.rule.max_tokens + 1)
            counts = sorted({target.padded(count) for count in range(1, most + 1)})
            uniforms = torch.zeros(2, dtype=torch.float64, device=target.lm.device)
            target.warm_up(self.step, counts, uniforms, self._length.tensor)
            return

        def inputs(example: RowsExample) -> tuple[Any, ...]:
            count = example.num_rows
            zeros = example.zeros
            return (
                zeros(count, example.num_columns),
                zeros(count),
                zeros(count, 2, dtype=torch.float64),
                zeros(count),
            )

        self.step.warm_up(inputs, [*memory.buffers()], memory.most + 1)

    def start(self, rows: Sequence[Row]) -> None:
        self.drafter.start(rows)
        for row in rows:
            row.num_read = len(row.committed) - 1 if len(self.readers) > 1 else 0

    def num_expected(self, row: Row) -> float | None:
        # Predictions speak of token verification alone.
        speaks = isinstance(self.verification, TokenVerification)
        expected = self.drafter.rule.num_expected(self.drafter.state) if speaks else None
        return None if expected is None else float(expected[row.place])

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[Round], Mark]:
        drafter = self.drafter
        drafter.state = drafter.rule.start_round(drafter.state)
        drafter.draft(rows, ends)
        drafted = clock.mark()
        if self.verified_memory is not self.memory:
            self.verified_memory.copy_(self.memory, max(row.num_drafted for row in rows))
        counts = self._counts.numbers
        counts[:] = 0
        rounds = []
        for row, result in zip(
            rows,
            self._verify_single(rows[0]) if self._single else self._verify_rows(rows),
            strict=True,
        ):
            num_accepted = result.num_accepted
            counts[0, row.place] = row.num_drafted
            counts[1, row.place] = num_accepted
            drafter.keep(row, num_accepted)
            if result.draft_nan or result.target_nan:
                row.fail_by_nan(self._pair.draft_id if result.draft_nan else self._pair.target_id)
            tokens = [*result.draft_tokens[:num_accepted], result.next_token]
            discarded = row.num_drafted - num_accepted
            rejected = result.draft_tokens[num_accepted : row.num_drafted]
            rounds.append(
                Round(
                    tokens,
                    row.num_drafted,
                    num_accepted,
                    discarded,
                    row.num_draft_calls,
                    rejected=rejected,
                )
            )
        self._counts.send()
        if drafter.rule.learns:
            drafter.state = drafter.rule.end_round(drafter.state, *self._outcome)
        return rounds, drafted

    def repeated_verification(self, num_drafted: int) -> Callable[[], object]:
        """Return a call that verifies `num_drafted` tokens of a single row, wherever memory ends."""
        target = self._target
        memory = self.verified_memory
        memory.probs.fill_(1 / target.lm.vocab_size)
        uniforms = torch.zeros(2, dtype=torch.float64, device=target.lm.device)
        length = torch.zeros(1, dtype=torch.long, device=target.lm.device)
        tokens = memory.read_from(0, target.padded(num_drafted + 1))[0]
        return lambda: self.step(tokens, uniforms, length)

    def _verify_single(self, row: Row) -> list[StepResult]:
        engine = self._target
        base = self._target.length
        count = row.num_drafted
        self.verified_memory.set_last(row.committed[-1])
        self._length.numbers[0] = count
        self._length.send()
        tokens = self.verified_memory.read_from(0, engine.padded(count + 1))[0]
        packed = self.step(tokens, row.verify_uniforms.take(2), self._length.tensor)
        result = StepResult.unpacked(packed.tolist()[0])
        engine.rewind(base + 1 + result.num_accepted)
        return [result]

    def _verify_rows(self, rows: Sequence[Row]) -> list[StepResult]:
        tokens = [[row.committed[-1], *row.drafted] for row in rows]
        starts = [len(row.committed) - 1 for row in rows]
        flat = self.step.flat([row.place for row in rows], tokens, starts)
        drafted = flat.counts - 1
        width = self._target.padded_rows(int(drafted.max()) + 1)
        index = flat.first[:, None] + np.minimum(np.arange(width), drafted[:, None])
        uniforms = np.array([[row.verify_uniforms.number() for _ in range(2)] for row in rows])
        packed = self.step(flat, [index, flat.rows, uniforms, drafted])
        return [StepResult.unpacked(each) for each in packed.tolist()[: len(rows)]]
