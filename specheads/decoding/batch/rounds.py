"""A round of all rows: with drafts and their verification, or of the target alone."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from specheads.decoding.batch.drafter import RowsDrafter
from specheads.decoding.batch.load_aware import LengthPolicy
from specheads.decoding.batch.reader import PromptReader
from specheads.decoding.batch.rows import Row, RowsExample, filled, flat_tokens
from specheads.decoding.batch.steps import RowsTargetStep
from specheads.decoding.batch.verifier import RowsVerifier
from specheads.decoding.clock import Clock, Mark
from specheads.decoding.drafting import DraftMemory
from specheads.decoding.drafting.autoregressive import ChainStep
from specheads.decoding.engine import Engine
from specheads.decoding.expectation import expected_of
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.verification import VerificationRule, VerifyStep
from specheads.pair import Pair
from specheads.sampling import Warp

LEAST_DRAFTED = 10
STEP_TOKENS = 8  # of a row that a draft step reads; more are read before it, without logits


class RowOutcome(NamedTuple):
    """What a round brought to one row."""

    tokens: Sequence[int]  # the accepted ones and the target's
    num_drafted: int = 0
    num_accepted: int = 0
    num_draft_calls: int = 0
    nan_in: str | None = None  # the model whose logits were NaN; then the rest means nothing


class Rounds(Protocol):
    """How rows get their next tokens."""

    engines: Sequence[Engine]  # the target's, then the draft's if there is one
    readers: Sequence[PromptReader]  # the target's, and the draft's if that reads prompts before their first round

    def warm_up(self, ends: Tensor) -> None:
        """Prepare the engines for all that rounds run; see `take` for `ends`."""

    def start(self, rows: Sequence[Row], target_hidden: Mapping[int, Tensor]) -> None:
        """Begin rows whose prompts were read.

        Args:
            target_hidden: (1, H) by row of the memory, the target's state at the last token of its prompt but one; a prompt of
                one token has none.
        """

    def num_expected(self, row: Row) -> float | None:
        """Return how many accepted tokens the stopping rule expected in a row; see DecodeStats."""

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[RowOutcome], Mark]:
        """Return what a round brings to each row, and the clock's mark when all had drafted.

        Args:
            ends: (V,) bool, the tokens that end a response and therefore a draft.
        """


class TargetRounds:
    """One token of the target, or of another model that decodes alone, for each row."""

    def __init__(self, model_id: str, engine: Engine, warp: Warp, num_rows: int, numbers: int = 1) -> None:
        """`numbers`: uniform numbers that a round takes from a row; the last one draws the token."""
        self._numbers = numbers
        self.engines: Sequence[Engine] = (engine,)
        self.readers: Sequence[PromptReader] = (PromptReader(engine, num_rows),)
        self._model_id, self._spare_row = model_id, num_rows
        self._step = engine.rows_step(RowsTargetStep(warp))

    def warm_up(self, ends: Tensor) -> None:
        examples = []
        for many in (False, True):
            example = RowsExample(self.engines[0], [], many)
            examples.append(example.arguments(example.zeros(example.num_tokens, dtype=torch.float64)))
        self.engines[0].warm_up_rows(self._step, examples)

    def start(self, rows: Sequence[Row], target_hidden: Mapping[int, Tensor]) -> None:
        """There is nothing to prepare."""

    def num_expected(self, row: Row) -> float | None:
        return None

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[RowOutcome], Mark]:
        drafted, engine = clock.mark(), self.engines[0]
        device, least = engine.lm.device, engine.padded_rows(len(rows))
        last = [row.session.committed[-1:] for row in rows]
        starts = [len(row.session.committed) - 1 for row in rows]
        flat = flat_tokens([row.row for row in rows], last, starts, least, self._spare_row, device)
        uniform = np.array([[row.session.verify_uniforms.number() for _ in range(self._numbers)][-1] for row in rows])
        packed = self._step(flat.tokens, flat.end, flat.places, filled(uniform, least, 0.0, device)).tolist()
        return [RowOutcome([token], nan_in=self._model_id if nan else None) for token, nan in packed[: len(rows)]], drafted


class SpeculativeRounds:
    """Chains drafted in lockstep, and one verification for all of them.

    A policy may let rows go without drafts. Such a round is one of the target alone, and the draft reads a prompt before it first
    drafts after it, which may be never.
    """

    def __init__(
        self,
        pair: Pair,
        engines: Sequence[Engine],
        stopping: StoppingRule,
        verification: VerificationRule,
        warp: Warp,
        num_rows: int,
        by_policy: bool = False,
    ) -> None:
        """Allocate memory for drafts.

        Args:
            engines: the target's and the draft's, with memory for one row more than `num_rows`.
            stopping: with a policy a fixed length of its longest draft.
            by_policy: `policy`, which is set before the first round, decides how long drafts are.
        """
        self.engines, self._pair = engines, pair
        target, draft = engines
        self.policy: LengthPolicy | None = None
        readers = [PromptReader(engine, num_rows) for engine in engines]
        self.readers: Sequence[PromptReader] = readers[:1] if by_policy else readers
        self._late_reader = readers[1] if by_policy else None
        # As many at least that a compiler can be shown a number of drafted tokens that is no other size.
        most = max(LEAST_DRAFTED, target.padded(stopping.max_tokens + 1) - 1)

        def memory(engine: Engine) -> DraftMemory:
            lm = pair.draft_lm
            return DraftMemory(most, lm.vocab_size, lm.probs_dtype, engine.lm.device, num_rows + 1)

        self._drafted = self._memory = memory(draft)
        if target.lm.device != draft.lm.device:
            self._memory = memory(target)
        step = ChainStep(draft.lm, warp, stopping, self._drafted)
        self._drafter = RowsDrafter(draft, step, num_rows)
        self._verifier = RowsVerifier(target, VerifyStep(warp, verification, self._memory), num_rows)
        self._alone: TargetRounds | None = None
        # A state has to learn of every round, and a rule may have to know the target's state after it.
        if by_policy and not stopping.reads_target and not tree_leaves(self._verifier.state):
            self._alone = TargetRounds(pair.target_id, target, warp, num_rows, numbers=2)  # as many as a verification
        self._target_hidden: Tensor | None = None
        if stopping.reads_target:
            size, dtype = target.lm.hidden_size, target.lm.output_embedding.weight.dtype
            self._target_hidden = torch.zeros(num_rows + 1, size, dtype=dtype, device=target.lm.device)

    def warm_up(self, ends: Tensor) -> None:
        self._drafter.warm_up(ends)
        self._verifier.warm_up()
        if self._late_reader is not None:
            self._late_reader.warm_up()
        if self._alone is not None:
            self._alone.warm_up(ends)

    def start(self, rows: Sequence[Row], target_hidden: Mapping[int, Tensor]) -> None:
        self._drafter.start(rows)
        self._verifier.start(rows)
        for row in rows:
            row.num_read = len(row.session.committed) - 1 if len(self.readers) > 1 else 0
            if self._target_hidden is not None:
                self._target_hidden[row.row] = target_hidden[row.row][0] if row.row in target_hidden else 0

    def num_expected(self, row: Row) -> float | None:
        return expected_of(self._drafter.rule, self._verifier.rule, self._drafter.state, row.row)

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[RowOutcome], Mark]:
        drafter, verifier = self._drafter, self._verifier
        most = drafter.rule.max_tokens
        if self.policy is not None:
            most = min(most, self.policy.length(len(rows), sum(len(row.session.committed) for row in rows)))
            if self._alone is not None and not (most and any(row.limit > 0 for row in rows)):
                return self._alone.take(rows, ends, clock)
            if most:
                self._catch_up([row for row in rows if row.limit > 0])
        drafter.state = drafter.rule.start_round(drafter.state, self._target_hidden)
        planned = self._planned(rows)
        drafter.draft(rows, ends, most)
        drafted = clock.mark()
        if self._memory is not self._drafted:
            self._memory.copy_(self._drafted, max(len(row.drafted) for row in rows))
        results, hidden = verifier.verify(rows, planned)
        if self._target_hidden is not None:
            self._target_hidden[torch.tensor([row.row for row in rows], device=hidden.device)] = hidden.to(self._target_hidden)
        counts = np.zeros((2, drafter.num_rows + 1), dtype=np.int64)  # submitted and accepted tokens
        outcomes = []
        for row, result in zip(rows, results, strict=True):
            num_accepted = result.num_accepted
            counts[:, row.row] = len(row.drafted), num_accepted
            row.num_probs_needed = result.num_probs_needed
            drafter.keep(row, num_accepted)
            nan_in = self._pair.draft_id if result.draft_nan else self._pair.target_id if result.target_nan else None
            tokens = [*row.drafted[:num_accepted], result.next_token]
            outcomes.append(RowOutcome(tokens, row.num_drafted, num_accepted, row.num_draft_calls, nan_in))
        num_submitted, num_accepted = torch.from_numpy(counts).to(ends.device)
        drafter.state = drafter.rule.end_round(drafter.state, num_submitted, num_accepted)
        return outcomes, drafted

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Let the draft read what a step would have to read beyond a few tokens: a prompt, or tokens of rounds without drafts."""
        late = [row for row in rows if len(row.session.committed) - row.num_read > STEP_TOKENS]
        if not late:
            return
        assert self._late_reader is not None
        starts = [row.num_read if self._late_reader.continues else 0 for row in late]
        texts = [row.session.committed[start:-1] for row, start in zip(late, starts, strict=True)]
        self._late_reader.read([row.row for row in late], texts, starts)
        for row in late:
            row.num_read = len(row.session.committed) - 1

    def _planned(self, rows: Sequence[Row]) -> list[int]:
        """Return how many tokens the stopping rule will draft in each row whatever they are; 0 if that depends on them."""
        rule = self._drafter.rule
        planned = rule.planned_length(self._drafter.state) if self._verifier.rule.reads_planned else None
        if planned is None:
            return [0] * len(rows)
        lengths = planned.tolist()
        return [min(lengths[row.row], row.limit, rule.max_tokens) for row in rows]
