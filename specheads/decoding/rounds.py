"""A round of all rows: chains and their verification, or one token of the target alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.clock import Clock, Mark
from specheads.decoding.engine import Engine, ForwardOutput
from specheads.decoding.records import Round
from specheads.decoding.rows import Rounds, Row
from specheads.decoding.step_inputs import DraftMemory, HostNumbers, RowsStep, with_rows
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.verification import TokenVerification
from specheads.decoding.verifier import ChainVerifier, VerifyStep
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, has_nan


class _TargetStep:
    """The epilogue of a forward pass of the target alone, over one token of each row."""

    open_inputs = ((0,),)

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.compile_key = (_TargetStep, warp)

    def __call__(self, output: ForwardOutput, uniform: Tensor) -> Tensor:
        """Return the next tokens and whether there was a NaN, (N, 2) long, drawn at `uniform` (N,)."""
        probs = self.warp(output.logits[:, -1])
        return torch.stack([self.warp.draw(probs, uniform), has_nan(probs).long()], dim=1)


class RoundParts(NamedTuple):
    """What rounds are made of."""

    pair: Pair
    engines: Sequence[Engine]  # the target's, and the draft's if one is run; with memory of one text, or of rows and a spare one
    stopping: StoppingRule
    verification: Any
    warp: Warp
    memory: DraftMemory  # holds the drafts, on the draft's device


class TargetRounds(Rounds):
    """One token of the target, or of another model that decodes alone, for each row."""

    def __init__(self, model_id: str, engine: Engine, warp: Warp) -> None:
        super().__init__((engine,))
        self._model_id, step = model_id, _TargetStep(warp)
        self._single = engine.num_rows == 1
        self.step: Any = engine.compiled_step(step) if self._single else RowsStep(engine, step)
        self._last = HostNumbers((1, 1), engine.lm.device)

    def warm_up(self, ends: Tensor) -> None:
        engine = self.engines[0]
        if self._single:
            engine.warm_up(self.step, (1,), torch.zeros(1, dtype=torch.float64, device=engine.lm.device))
        else:
            self.step.warm_up(lambda example: (example.zeros(example.num_tokens, dtype=torch.float64),))

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[Round], Mark]:
        drafted = clock.mark()
        if self._single:
            self._last.numbers[0, 0] = rows[0].committed[-1]
            self._last.send()
            packed = self.step(self._last.tensor, rows[0].verify_uniforms.take(1))
        else:
            starts = [len(row.committed) - 1 for row in rows]
            flat = self.step.flat([row.place for row in rows], [row.committed[-1:] for row in rows], starts)
            uniform = np.array([row.verify_uniforms.number() for row in rows])
            packed = self.step(flat, [uniform])
        rounds = []
        for row, (token, nan) in zip(rows, packed.tolist(), strict=False):  # what follows filled the step up
            rounds.append(Round([token]))
            if nan:
                row.fail_by_nan(self._model_id)
        return rounds, drafted


class Drafter:
    """The base of what drafts chains in the rows of a memory. It owns the stopping rule's state."""

    def __init__(self, engine: Engine, rule: StoppingRule) -> None:
        self._engine, self.rule = engine, rule
        self.state: Any = rule.start_prompt(engine.num_rows, engine.lm.device)  # a row's state is at its place in memory

    def warm_up(self, ends: Tensor) -> None:
        raise NotImplementedError

    def start(self, rows: Sequence[Row]) -> None:
        """Begin other prompts in some rows."""
        new = self.rule.start_prompt(len(rows), self._engine.lm.device)
        self.state = new if self._engine.num_rows == 1 else with_rows(self.state, [row.place for row in rows], new)

    def draft(self, rows: Sequence[Row], ends: Tensor) -> None:
        """Draft up to the rule's most tokens for each row, into the row, and their distributions into memory."""
        raise NotImplementedError

    def keep(self, row: Row, num_accepted: int) -> None:
        """Forget what a row's draft has read beyond the accepted tokens. Call it before they are committed."""
        raise NotImplementedError


class ChainRounds(Rounds):
    """Chains, and one verification for those of all rows."""

    def __init__(self, parts: RoundParts, drafter: Drafter) -> None:
        super().__init__(parts.engines)
        self._pair, target, memory = parts.pair, parts.engines[0], parts.memory
        self.drafter, self.memory, self._memory = drafter, memory, memory
        if target.lm.device != memory.probs.device:
            lm = target.lm
            self._memory = DraftMemory(memory.most, lm.vocab_size, lm.probs_dtype, lm.device, target.num_rows)
        step = VerifyStep(parts.warp, parts.verification, self._memory)
        self.verifier = ChainVerifier(target, step, drafter.rule.max_tokens)
        self._counts = HostNumbers((2, target.num_rows), memory.probs.device)  # drafted and accepted tokens
        self._outcome = self._counts.tensor.unbind()

    def warm_up(self, ends: Tensor) -> None:
        self.drafter.warm_up(ends)
        self.verifier.warm_up()

    def start(self, rows: Sequence[Row]) -> None:
        self.drafter.start(rows)
        for row in rows:
            row.num_read = len(row.committed) - 1 if len(self.readers) > 1 else 0

    def num_expected(self, row: Row) -> float | None:
        # Predictions speak of token verification alone.
        speaks = isinstance(self.verifier.rule, TokenVerification)
        expected = self.drafter.rule.num_expected(self.drafter.state) if speaks else None
        return None if expected is None else float(expected[row.place])

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[Round], Mark]:
        drafter = self.drafter
        drafter.state = drafter.rule.start_round(drafter.state)
        drafter.draft(rows, ends)
        drafted = clock.mark()
        return self._verified(rows), drafted

    def _verified(self, rows: Sequence[Row]) -> list[Round]:
        """Return each row's round; the rules learn of it."""
        drafter = self.drafter
        if self._memory is not self.memory:
            self._memory.copy_(self.memory, max(row.num_drafted for row in rows))
        counts = self._counts.numbers
        counts[:] = 0
        rounds = []
        for row, result in zip(rows, self.verifier.verify(rows), strict=True):
            num_accepted = result.num_accepted
            counts[0, row.place], counts[1, row.place] = row.num_drafted, num_accepted
            drafter.keep(row, num_accepted)
            if result.draft_nan or result.target_nan:
                row.fail_by_nan(self._pair.draft_id if result.draft_nan else self._pair.target_id)
            tokens, discarded = [*result.draft_tokens[:num_accepted], result.next_token], row.num_drafted - num_accepted
            rounds.append(Round(tokens, row.num_drafted, num_accepted, discarded, row.num_draft_calls))
        self._counts.send()
        if drafter.rule.learns:
            drafter.state = drafter.rule.end_round(drafter.state, *self._outcome)
        return rounds
