"""How drafts are proposed: the interface of drafting methods, and chains."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from specheads.decoding.engine import Engine, ForwardOutput
from specheads.decoding.records import CHAIN, short_repr
from specheads.decoding.rounds import ChainRounds, Drafter, RoundParts
from specheads.decoding.rows import Rounds, Row
from specheads.decoding.step_inputs import (
    DraftMemory,
    HostNumbers,
    RowsExample,
    RowsStep,
    with_rows,
)
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.stopping.rule import unless
from specheads.decoding.verification import TokenVerification, Verification
from specheads.errors import UserError
from specheads.heads.features import drafting_features
from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.settings import check_arguments


class Drafting:
    """`drafting=`: how tokens are proposed.

    A new method is a subclass that the `_target_` of a file in conf/drafting/ names.
    """

    reads_draft = True  # whether a draft model is run
    kind = CHAIN  # how tokens are chosen, which decides what may verify them
    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Raise UserError for an `argument` that is of another type."""
        check_arguments(self, "drafting")

    def usual_verification(self) -> Verification:
        """Return the rule that verifies such drafts unless another one is chosen."""
        return TokenVerification()

    def pair(self, pair: Pair) -> Pair:
        """Return the pair that decodes: a method that makes a draft replaces the pair's draft."""
        return pair

    def most_read(self, max_tokens: int) -> int:
        """Return how many positions beyond the text the draft model may write, where paths have up
        to `max_tokens` tokens.
        """
        return 0

    def most_verified(self, max_tokens: int) -> int:
        """Return the same for the target."""
        return 0

    def rounds(self, parts: RoundParts) -> Rounds:
        """Return how rows draft and verify.

        Raises UserError for a rule, or a number of rows, that this method cannot serve.
        """
        raise NotImplementedError


PENDING = (
    1,
    2,
)  # committed tokens that a round's first step reads: two after a fully accepted draft


class Autoregressive(Drafting):
    """`drafting=autoregressive`: a chain, as long as the stopping rule lets it grow."""

    def rounds(self, parts: RoundParts) -> ChainRounds:
        engine = parts.engines[1]
        step = ChainStep(parts.pair.draft_lm, parts.warp, parts.stopping, parts.memory)
        return ChainRounds(
            parts,
            _SingleDrafter(engine, step) if engine.num_rows == 1 else _RowsDrafter(engine, step),
        )


class ChainState(NamedTuple):
    """The state that each step passes on to the next."""

    stopped: Tensor  # (B,) bool, whether the draft has ended; then steps change nothing here
    rule: Any  # the stopping rule's state, tensors (B, ...)


class ChainStep:
    """The epilogue of a draft forward pass: warp, sample, features, stopping rule.

    An engine may compile it.
    """

    updates_last_input = True

    def __init__(
        self, lm: LanguageModel, warp: Warp, rule: StoppingRule, memory: DraftMemory
    ) -> None:
        self.lm = lm
        self.warp = warp
        self.rule = rule
        self.memory = memory
        self.compile_key = (ChainStep, warp, rule.compile_key, memory)

    def __call__(
        self, output: ForwardOutput, index: Tensor, uniform: Tensor, ends: Tensor, state: ChainState
    ) -> ChainState:
        """Write the drafted token and its distribution into the memory, at `index` (1,).

        Return the new state; see `draw`.
        """
        token, probs, state = self.draw(
            output.logits[:, -1], output.hidden[:, -1], uniform, ends, state
        )
        self.memory.write(index, token, probs)
        return state

    def draw(
        self, logits: Tensor, hidden: Tensor, uniform: Tensor, ends: Tensor, state: ChainState
    ) -> tuple[Tensor, Tensor, ChainState]:
        """Return the tokens (B,) drawn after `logits` (B, V), their distributions (B, V), and the
        new state.

        The logits are of the states `hidden` (B, H), `uniform` (B,) in [0, 1) samples, and tokens
        of `ends` (V,) bool end drafts.
        """
        probs = self.warp(logits)
        token = self.warp.draw(probs, uniform)
        features = drafting_features(
            self.rule.needs, logits, token, hidden, self.lm.embed, self.lm.kept_tokens
        )
        new, stop = self.rule.step(state.rule, features)
        kept = unless(state.stopped, state.rule, new)
        return token, probs, ChainState(state.stopped | stop | ends[token], kept)


class _RowsChainStep:
    """The epilogue of a draft forward pass over rows: a token for each of some of them."""

    open_inputs = ((0,), (0,), (0,), (0,))

    def __init__(self, step: ChainStep) -> None:
        self.step = step
        self.compile_key = (_RowsChainStep, *step.compile_key)

    def __call__(
        self,
        output: ForwardOutput,
        last: Tensor,
        rows: Tensor,
        index: Tensor,
        uniform: Tensor,
        ends: Tensor,
        state: ChainState,
    ) -> tuple[Tensor, ChainState]:
        """Return the drafted tokens and whether their drafts end with them, (n, 2) long, and the
        new state of all rows.

        `last` (n,) says where in the forward pass each row's last token is, `index` (n,) which
        token of its draft it gets; `rows` (n,) are those of the memory and of `state`. All are
        long; for the others see `ChainStep.draw`.
        """
        logits = output.logits[last, -1]
        hidden = output.hidden[last, -1]
        token, probs, new = self.step.draw(
            logits, hidden, uniform, ends, tree_map(lambda part: part[rows], state)
        )
        self.step.memory.write(index, token, probs, rows)
        return torch.stack([token, new.stopped.long()], dim=1), with_rows(state, rows, new)


class _SingleDrafter(Drafter):
    """Drafts chains of an engine whose memory has one text."""

    def __init__(self, engine: Engine, step: ChainStep) -> None:
        super().__init__(engine, step.rule)
        self._memory = step.memory
        self.step = engine.compiled_step(step)
        self._pending = [HostNumbers((1, count), engine.lm.device) for count in PENDING]
        self._going = torch.tensor([False], device=engine.lm.device)

    def warm_up(self, ends: Tensor) -> None:
        uniform = torch.zeros(1, dtype=torch.float64, device=ends.device)
        state = ChainState(self._going, self.state)
        self._engine.warm_up(self.step, PENDING, self._memory.indices[0], uniform, ends, state)

    def draft(self, rows: Sequence[Row], ends: Tensor) -> None:
        row = rows[0]
        memory = self._memory
        uniforms = row.draft_uniforms
        most = min(self.rule.max_tokens, row.most_drafted)
        count = 0
        tokens = self._unread(row)
        state = ChainState(self._going, self.state)
        while count < most:
            if tokens.shape[1] == 1 and self._engine.repeats(self.step):
                memory.set_last(row.committed[-1])
                numbers = uniforms.take_up_to(most - count)
                before, places = memory.read_from(count, len(numbers))
                run, state = self._engine.repeat(self.step, before, [places, numbers], ends, state)
                uniforms.give_back(len(numbers) - run)
            else:
                run = 1
                state = self.step(tokens, memory.indices[count], uniforms.take(1), ends, state)
            count += run
            tokens = memory.drafted(count - 1)
            if state.stopped.item():
                break
        row.num_drafted = row.num_draft_calls = count
        self.state = state.rule

    def _unread(self, row: Row) -> Tensor:
        """Return the committed tokens (1, n) that the draft has not read."""
        unread = row.committed[self._engine.length :]
        if len(unread) not in PENDING:
            return torch.tensor([unread], device=self._going.device)
        pending = self._pending[PENDING.index(len(unread))]
        pending.numbers[0] = unread
        pending.send()
        return pending.tensor

    def keep(self, row: Row, num_accepted: int) -> None:
        self._engine.rewind(min(self._engine.length, len(row.committed) + num_accepted))

    def repeated_steps(self, count: int) -> Callable[[], None]:
        engine = self._engine
        memory = self._memory
        device = engine.lm.device
        uniforms = torch.zeros(count, dtype=torch.float64, device=device)
        ends = torch.zeros(engine.lm.vocab_size, dtype=torch.bool, device=device)
        state = ChainState(self._going, self.rule.start_prompt(1, device))
        tokens, places = memory.read_from(0, count)

        def draft() -> None:
            if engine.repeats(self.step):
                engine.repeat(self.step, tokens, [places, uniforms], ends, state, least=count)
                return
            for number in range(count):
                token = memory.drafted(number - 1)
                drafted = self.step(token, memory.indices[number], uniforms[:1], ends, state)
                drafted.stopped.item()  # as drafting asks after each step

        return draft


class _RowsDrafter(Drafter):
    """Drafts chains of an engine whose memory has several texts, each step one token in every row
    whose draft has not ended.
    """

    def __init__(self, engine: Engine, step: ChainStep) -> None:
        super().__init__(engine, step.rule)
        self._memory = step.memory
        self._step = RowsStep(engine, _RowsChainStep(step))
        self._going = torch.zeros(engine.num_rows, dtype=torch.bool, device=engine.lm.device)

    def warm_up(self, ends: Tensor) -> None:
        state = ChainState(self._going, self.state)

        def inputs(example: RowsExample) -> tuple[Any, ...]:
            last, rows, index = (example.zeros(example.num_rows) for _ in range(3))
            return last, rows, index, last.double(), ends, state

        self._step.warm_up(inputs, [ends, *tree_leaves(state), *self._memory.buffers()])

    def draft(self, rows: Sequence[Row], ends: Tensor) -> None:
        state = ChainState(self._going, self.state)
        going = list(rows)
        for row in rows:
            row.drafted = []
            row.num_draft_calls = 0
        while drafting := [
            row for row in going if len(row.drafted) < min(row.most_drafted, self.rule.max_tokens)
        ]:
            unread = [row.unread for row in drafting]
            flat = self._step.flat(
                [row.place for row in drafting], unread, [row.num_read for row in drafting]
            )
            index = np.array([len(row.drafted) for row in drafting])
            uniform = np.array([row.draft_uniforms.number() for row in drafting])
            drawn, state = self._step(flat, [flat.last, flat.rows, index, uniform], ends, state)
            going = []
            for row, tokens, (token, stopped) in zip(
                drafting, unread, drawn.tolist(), strict=False
            ):  # what follows filled it up
                row.num_read += len(tokens)
                row.num_draft_calls += 1
                row.drafted.append(token)
                going += [] if stopped else [row]
        for row in rows:
            row.num_drafted = len(row.drafted)
        self.state = state.rule

    def keep(self, row: Row, num_accepted: int) -> None:
        # Positions beyond what was read are overwritten.
        row.num_read = min(row.num_read, len(row.committed) + num_accepted)


def check_pairing(drafting: Drafting, rule: Verification) -> None:
    """Raise UserError for a rule that cannot verify such drafts."""
    if drafting.kind not in rule.takes:
        raise UserError(
            f"{rule.label} does not take what {type(drafting).__name__} drafts, {drafting.kind};"
            f" use for example verification={drafting.usual_verification().name}."
        )
