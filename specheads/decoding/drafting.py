"""How drafts are proposed: the interface of drafting methods, and chains.

A new method is a module with a Drafting and a config in conf/drafting/ whose `_target_` names it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from specheads.decoding.engine import Engine, ForwardOutput
from specheads.decoding.records import CHAIN
from specheads.decoding.rounds import ChainRounds
from specheads.decoding.rows import Rounds, Row
from specheads.decoding.step_inputs import DraftMemory, HostNumbers, RowsExample, filled, flat_tokens, of_rows, with_rows
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.verification import TokenVerification, Verification, VerificationRule
from specheads.errors import UserError
from specheads.heads.features import drafting_features
from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp


class Drafting:
    """`drafting=`: how tokens are proposed.

    A new method is a subclass in a new file and a config in conf/drafting/ whose `_target_` names it.
    """

    reads_draft = True  # whether a draft model is run

    @property
    def kind(self) -> str:
        """How tokens are chosen, which decides what may verify them."""
        return CHAIN

    def usual_verification(self) -> Any:
        """Return the Verification of such drafts unless another one is chosen; None: token verification."""
        return None

    def pair(self, pair: Pair) -> Pair:
        """Return the pair that decodes: a method that makes a draft replaces the pair's draft."""
        return pair

    def most_read(self, max_tokens: int) -> int:
        """Return how many positions beyond the text the draft model may write, where paths have up to `max_tokens` tokens."""
        return 0

    def most_verified(self, max_tokens: int) -> int:
        """Return how many positions beyond the text the target may write, where paths have up to `max_tokens` tokens."""
        return 0

    def rounds(
        self,
        pair: Pair,
        engines: Sequence[Engine],
        stopping: StoppingRule,
        verification: Any,
        warp: Warp,
        memory: DraftMemory,
    ) -> Rounds:
        """Return how rows draft and verify by these choices.

        Args:
            engines: the target's, and the draft's where `reads_draft`; with memory of one text, or of a batch's rows and one
                more.
            memory: of chains, on the draft's device; decoders that share an engine share it, too.

        Raises:
            UserError: a rule that needs features which this method does not have; a batch where it drafts for one row only.
        """
        raise NotImplementedError


PENDING = (1, 2)  # committed tokens that a round's first step reads: two after a fully accepted draft


class Autoregressive(Drafting):
    """`drafting=autoregressive`: a chain, as long as the stopping rule lets it grow."""

    def rounds(
        self,
        pair: Pair,
        engines: Sequence[Engine],
        stopping: StoppingRule,
        verification: VerificationRule,
        warp: Warp,
        memory: DraftMemory,
    ) -> ChainRounds:
        make = _SingleDrafter if engines[1].num_rows == 1 else _RowsDrafter
        drafter = make(engines[1], ChainStep(pair.draft_lm, warp, stopping, memory))
        return ChainRounds(pair, engines, drafter, verification, warp, memory)


class ChainState(NamedTuple):
    """The state that each step passes on to the next."""

    stopped: Tensor  # (B,) bool, whether the draft has ended; then steps change nothing here
    rule: Any  # of the stopping rule, tensors (B, ...)


class ChainStep:
    """The epilogue of a draft forward pass: warp, sample, features, stopping rule. An engine may compile it."""

    updates_last_input = True

    def __init__(self, lm: LanguageModel, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> None:
        self.lm, self.warp, self.rule, self.memory = lm, warp, rule, memory
        self.compile_key = (ChainStep, warp, rule.compile_key, memory)

    def __call__(self, output: ForwardOutput, index: Tensor, uniform: Tensor, ends: Tensor, state: ChainState) -> ChainState:
        """Write the drafted token and its distribution into the memory; return the new state.

        Args:
            index: (1,) long, of the token in the memory.
            uniform: (B,) in [0, 1), at which the token is sampled.
            ends: (V,) bool, the tokens that end a response and therefore a draft.
        """
        token, probs, state = self.draw(output.logits[:, -1], output.hidden[:, -1], uniform, ends, state)
        self.memory.write(index, token, probs)
        return state

    def draw(
        self, logits: Tensor, hidden: Tensor, uniform: Tensor, ends: Tensor, state: ChainState
    ) -> tuple[Tensor, Tensor, ChainState]:
        """Return the tokens (B,) drawn after `logits` (B, V), their distributions (B, V), and the new state.

        Args:
            hidden: (B, H), the states that the logits were computed from.
        """
        probs = self.warp(logits)
        token = self.warp.draw(probs, uniform)
        features = drafting_features(self.rule.needs, logits, token, hidden, self.lm.embed)
        new, stop = self.rule.step(state.rule, features)
        kept = tree_map(partial(_unless, state.stopped), state.rule, new)
        return token, probs, ChainState(state.stopped | stop | ends[token], kept)


def _unless(stopped: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Return `new` (B, ...) in the type of `old`, which every step must receive, or `old` in rows that are `stopped` (B,)."""
    return old if new is old else torch.where(stopped.reshape(-1, *[1] * (new.dim() - 1)), old, new.to(old.dtype))


class _RowsChainStep:
    """The epilogue of a draft forward pass over rows: a token for each of some of them."""

    open_inputs = ((0,), (0,), (0,), (0,))

    def __init__(self, step: ChainStep) -> None:
        self.step = step
        self.compile_key = (_RowsChainStep, *step.compile_key)

    def __call__(
        self, output: ForwardOutput, last: Tensor, rows: Tensor, index: Tensor, uniform: Tensor, ends: Tensor, state: ChainState
    ) -> tuple[Tensor, ChainState]:
        """Return the drafted tokens and whether their drafts end with them, (n, 2) long, and the new state of all rows.

        Args:
            last: (n,) long, where in the forward pass each row's last token is.
            rows: (n,) long, rows of the memory and of the state.
            index: (n,) long, of the token in each row's draft.
            uniform: (n,) in [0, 1), at which the tokens are sampled.
            ends: (V,) bool, the tokens that end a response and therefore a draft.
            state: of all rows.
        """
        logits, hidden = output.logits[last, -1], output.hidden[last, -1]
        token, probs, new = self.step.draw(logits, hidden, uniform, ends, of_rows(state, rows))
        self.step.memory.write(index, token, probs, rows)
        return torch.stack([token, new.stopped.long()], dim=1), with_rows(state, rows, new)


class _SingleDrafter:
    """Drafts chains of an engine whose memory has one text. It owns the rule's state."""

    def __init__(self, engine: Engine, step: ChainStep) -> None:
        self.rule, self._engine, self._memory, device = step.rule, engine, step.memory, engine.lm.device
        self.step = engine.compiled_step(step)
        self._pending = [HostNumbers((1, count), device) for count in PENDING]
        self._going, self._stopped = torch.tensor([[False], [True]], device=device)
        self.state: Any = self.rule.start_prompt(1, device)

    def warm_up(self, ends: Tensor) -> None:
        uniform = torch.zeros(1, dtype=torch.float64, device=ends.device)
        state = ChainState(self._going, self.state)
        self._engine.warm_up(self.step, PENDING, self._memory.indices[0], uniform, ends, state)

    def start(self, rows: Sequence[Row]) -> None:
        self.state = self.rule.start_prompt(1, self._going.device)

    def draft(self, rows: Sequence[Row], ends: Tensor, most: int) -> None:
        row, memory = rows[0], self._memory
        uniforms, most, count = row.draft_uniforms, min(most, row.most_drafted), 0
        tokens, state = self._unread(row), ChainState(self._going, self.state)
        while count < most:
            state = self.step(tokens, memory.indices[count], uniforms.take(1), ends, state)
            tokens, count = memory.drafted(count), count + 1
            if state.stopped.item():
                break
        row.num_drafted = row.num_draft_calls = count
        row.has_next_probs = row.num_probs_needed > count
        if row.has_next_probs:  # only the distribution matters, the state stays as it is
            state = self.step(tokens, memory.indices[count], uniforms.take(1), ends, ChainState(self._stopped, state.rule))
            uniforms.give_back(1)
            row.num_draft_calls += 1
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


class _RowsDrafter:
    """Drafts chains of an engine whose memory has several texts, each step one token in every row whose draft has not ended."""

    def __init__(self, engine: Engine, step: ChainStep) -> None:
        self.rule, self._engine, self._memory = step.rule, engine, step.memory
        self._step, device = engine.rows_step(_RowsChainStep(step)), engine.lm.device
        self._going, self._stopped = torch.tensor([[False], [True]], device=device).repeat(1, engine.num_rows)
        self.state: Any = self.rule.start_prompt(engine.num_rows, device)

    def warm_up(self, ends: Tensor) -> None:
        examples, state = [], ChainState(self._going, self.state)
        for many in (False, True):
            example = RowsExample(self._engine, [ends, *tree_leaves(state), *self._memory.buffers()], many)
            last, rows, index = (example.zeros(example.num_rows) for _ in range(3))
            examples.append(example.arguments(last, rows, index, last.double(), ends, state))
        self._engine.warm_up_rows(self._step, examples)

    def start(self, rows: Sequence[Row]) -> None:
        device = self._going.device
        new = self.rule.start_prompt(len(rows), device)
        self.state = with_rows(self.state, torch.tensor([row.place for row in rows], device=device), new)

    def draft(self, rows: Sequence[Row], ends: Tensor, most: int) -> None:
        state, drafting = ChainState(self._going, self.state), []
        for row in rows:
            row.drafted, row.num_draft_calls = [], 0
            if min(row.most_drafted, most) > 0:
                drafting.append(row)
        while drafting:
            drawn, state = self._run(drafting, ends, state)
            going = []
            for row, (token, stopped) in zip(drafting, drawn, strict=True):
                row.drafted.append(token)
                if not stopped and len(row.drafted) < min(row.most_drafted, most):
                    going.append(row)
            drafting = going
        for row in rows:
            row.num_drafted = len(row.drafted)
            row.has_next_probs = row.num_probs_needed > row.num_drafted
        waiting = [row for row in rows if row.has_next_probs]
        if waiting:  # only the distributions matter, the state stays as it is
            _, state = self._run(waiting, ends, ChainState(self._stopped, state.rule))
            for row in waiting:
                row.draft_uniforms.give_back(1)
        self.state = state.rule

    def _run(self, rows: Sequence[Row], ends: Tensor, state: ChainState) -> tuple[list[list[int]], ChainState]:
        """Run one step; return each row's token and whether its draft ends with it, and the new state."""
        device, least = ends.device, self._engine.padded_rows(len(rows))
        unread = [row.unread for row in rows]
        places, starts = [row.place for row in rows], [row.num_read for row in rows]
        flat = flat_tokens(self._engine, places, unread, starts)
        index = np.array([len(row.drafted) for row in rows])
        uniform = np.array([row.draft_uniforms.number() for row in rows])
        drawn, state = self._step(
            flat.tokens,
            flat.end,
            flat.places,
            filled(flat.first + flat.counts - 1, least, 0, device),
            filled(np.array(places), least, self._engine.num_rows - 1, device),
            filled(index, least, 0, device),
            filled(uniform, least, 0.0, device),
            ends,
            state,
        )
        for row, tokens in zip(rows, unread, strict=True):
            row.num_read += len(tokens)
            row.num_draft_calls += 1
        return drawn.tolist()[: len(rows)], state

    def keep(self, row: Row, num_accepted: int) -> None:
        # Positions beyond what was read are overwritten.
        row.num_read = min(row.num_read, len(row.committed) + num_accepted)


def default_verification(drafting: Drafting) -> Verification:
    """Return the rule that verifies such drafts unless another one is chosen."""
    return drafting.usual_verification() or TokenVerification()


def check_pairing(drafting: Drafting, rule: Verification) -> None:
    """Raise UserError for a rule that cannot verify such drafts."""
    if drafting.kind not in rule.takes:
        raise UserError(
            f"{rule.label} does not take what {type(drafting).__name__} drafts, {drafting.kind}; use for example verification="
            f"{default_verification(drafting).name}."
        )
