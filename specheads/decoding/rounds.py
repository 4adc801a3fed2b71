"""A round of all requests: chains and their verification, or one token of the target alone.

`ChainRounds.take` is the algorithm. The inner loops stand twice: steps of a single row read the
engine's own length and reuse their tensors; steps over several rows read joined tokens. A single
request in the latter took several times as long per token (nano, compiled).
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from specheads.decoding.engine import Engine, Engines, ForwardOutput
from specheads.decoding.records import Clock, Mark, Round
from specheads.decoding.request import Request
from specheads.decoding.step_inputs import (
    CarriedStates,
    DraftMemory,
    ExampleSizes,
    JoinedStep,
    PromptReader,
    with_rows,
)
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.stopping.rule import State
from specheads.decoding.verification import (
    Block,
    TokenVerification,
    VerificationRule,
    compared,
)
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, greedy_tokens, has_nan

logger = logging.getLogger(__name__)

# Of a draft that reads its target: after so many drafts too few accepted first tokens are reported.
# With a fifth accepted, a warning has probability 0.0013.
WATCHED_DRAFTS = 50
LEAST_ACCEPTED = 0.05


class Rounds:
    """The base of how requests get their next tokens."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = Engines(engines)
        target, *others = engines
        draft = self.engines.draft
        # What the target's steps write for a draft that reads its states
        self.carried = CarriedStates(draft) if draft.lm.reads_layers else None
        self.readers = [PromptReader(target, self.carried), *map(PromptReader, others)]

    def warm_up(self, end_tokens: Tensor) -> None:
        """Prepare the engines for all that rounds run; see `take` for `end_tokens`."""
        raise NotImplementedError

    def start(self, requests: Sequence[Request]) -> None:
        """Begin requests whose prompts were read."""

    def num_expected(self, request: Request) -> float | None:
        """Return how many accepted tokens the stopping rule expected; see DecodeStats."""
        return None

    def take(
        self, requests: Sequence[Request], end_tokens: Tensor, clock: Clock
    ) -> tuple[list[Round], Mark]:
        """Return each request's round without its seconds, and the mark after drafting.

        Tokens of `end_tokens` (V,) bool end drafts.
        """
        raise NotImplementedError


class _TargetStep:
    """The epilogue of a forward pass of the target alone, over one token of each row."""

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.compile_key = (_TargetStep, warp)

    def __call__(self, output: ForwardOutput, uniform: Tensor) -> Tensor:
        """Return the next tokens, sampled by `uniform` (N,), and whether there was a NaN,
        (N, 2) long.
        """
        logits = output.logits[:, -1]
        if self.warp.greedy:
            best, zero = greedy_tokens(logits)
            return torch.stack([best, zero.isnan().long()], dim=1)
        probs = self.warp(logits)
        return torch.stack([self.warp.draw(probs, uniform), has_nan(probs).long()], dim=1)


class _TargetRowsStep:
    """The same in rows, with the states that labels of responses are computed from: one compiled
    step serves those that need labels and those that do not.
    """

    open_inputs = ((0,),)

    def __init__(self, warp: Warp) -> None:
        self.compile_key = (_TargetRowsStep, warp)
        self.step = _TargetStep(warp)

    def __call__(self, output: ForwardOutput, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `_TargetStep` does, and the hidden states (N, H)."""
        return self.step(output, uniform), output.hidden[:, -1]


class TargetRounds(Rounds):
    """One token of the target, or of another model that decodes alone, for each request."""

    # (N, H), valid until the next round: the states that predicted the last round's tokens, those
    # of its requests first. None with a single row.
    states: Tensor | None = None

    def __init__(self, model_id: str, engine: Engine, warp: Warp) -> None:
        super().__init__((engine,))
        self._model_id = model_id
        self._engine = engine
        self._single = engine.num_rows == 1
        self._step = engine.compiled_step(_TargetStep(warp))
        self._joined = JoinedStep(engine, _TargetRowsStep(warp))
        self._last = torch.zeros((1, 1), dtype=torch.long, device=engine.lm.device)

    def warm_up(self, end_tokens: Tensor) -> None:
        if self._single:
            self._engine.warm_up(self._step, (1,), _float_zeros(self._engine, 1))
        else:
            self._joined.warm_up(lambda sizes: (sizes.zeros(sizes.num_tokens).double(),))

    def take(
        self, requests: Sequence[Request], end_tokens: Tensor, clock: Clock
    ) -> tuple[list[Round], Mark]:
        drafted = clock.mark()
        rounds = []
        sampled = self._single_token(requests[0]) if self._single else self._tokens(requests)
        for request, (token, is_nan) in zip(requests, sampled.tolist(), strict=False):
            rounds.append(Round([token]))
            if is_nan:
                request.fail_by_nan(self._model_id)
        return rounds, drafted

    def _single_token(self, request: Request) -> Tensor:
        self._last.fill_(request.committed[-1])
        sampled: Tensor = self._step(self._last, request.verify_uniforms.take(1))
        return sampled

    def _tokens(self, requests: Sequence[Request]) -> Tensor:
        """Return the tokens (N, 2) of all requests, and of what fills the step up after them."""
        joined = self._joined.join(
            rows=[request.row for request in requests],
            tokens=[request.committed[-1:] for request in requests],
            starts=[len(request.committed) - 1 for request in requests],
        )
        uniforms = np.array([request.verify_uniforms.number() for request in requests])
        sampled: Tensor
        sampled, self.states = self._joined(joined, [uniforms])
        return sampled

    def repeated_step(self) -> Callable[[], object]:
        """Return a call that takes the step of a single row again and again, wherever memory
        ends.
        """
        uniform = _float_zeros(self._engine, 1)
        return lambda: self._step(self._last, uniform)


class RoundParts(NamedTuple):
    """What rounds are made of.

    `engines` have memory of one text, or of several rows and a spare one.
    """

    pair: Pair
    engines: Engines
    stopping: StoppingRule
    verification: Any  # of the kind that `Drafting.kind` names
    warp: Warp
    memory: DraftMemory  # holds the drafts, on the draft's device


class Drafter:
    """The base of what drafts chains in the rows of a memory. It owns the stopping rule's state,
    (R, ...) for the rows of the engine.
    """

    def __init__(self, engine: Engine, rule: StoppingRule) -> None:
        self._engine = engine
        self.rule = rule
        self.state: State = rule.start_prompt(engine.num_rows, engine.lm.device)

    def warm_up(self, end_tokens: Tensor) -> None:
        """Prepare the engine for all that drafts run."""
        raise NotImplementedError

    def warm_up_repeated(self, end_tokens: Tensor) -> None:
        """Prepare the engine for `repeated_steps` alone."""
        raise NotImplementedError

    def start(self, requests: Sequence[Request]) -> None:
        """Begin other prompts in some rows."""
        new = self.rule.start_prompt(len(requests), self._engine.lm.device)
        if self._engine.num_rows == 1:
            self.state = new
        else:
            self.state = with_rows(self.state, [request.row for request in requests], new)

    def draft(self, requests: Sequence[Request], end_tokens: Tensor) -> None:
        """Draft up to the rule's most tokens for each request, into the request, and their
        distributions into memory.
        """
        raise NotImplementedError

    def num_kept(self, request: Request, num_accepted: int) -> int:
        """Return how many positions of the draft's memory stay valid, if they were read.

        What was read next to states of the draft is read again next to those of the target.
        """
        num_committed = len(request.committed)
        return num_committed - 1 if request.num_skipped else num_committed + num_accepted

    def keep(self, request: Request, num_accepted: int) -> None:
        """Forget what a request's draft has read beyond the accepted tokens.

        Call it before they are committed.
        """
        raise NotImplementedError

    def repeated_steps(self, count: int) -> Callable[[], None]:
        """Return a call that drafts `count` tokens of a single row, wherever memory ends, and ends
        no draft.
        """
        raise NotImplementedError


class _FirstTokens:
    """How many of the first tokens of drafts are accepted, of a draft that reads its target: wrong
    layers or norms fail nowhere, but lower it.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._num_drafts = 0
        self._num_accepted = 0

    def note(self, rounds: Sequence[Round]) -> None:
        """Count those of some rounds; warn once if the first drafts show almost none."""
        if self._num_drafts >= WATCHED_DRAFTS:
            return
        for each in rounds:
            self._num_drafts += each.num_drafted > 0
            self._num_accepted += each.num_accepted > 0
        few = self._num_accepted < LEAST_ACCEPTED * self._num_drafts
        if few and self._num_drafts >= WATCHED_DRAFTS:
            draft: Any = self._pair.draft
            if draft.described not in self._pair.said:
                self._pair.said.add(draft.described)
                logger.warning(
                    "of the first tokens of %d drafts of %s, %d were accepted, about as many as by"
                    " chance. It is %s; name other layers (model.draft_layers=), correct the norms"
                    " in its config.json, or give the target that it was trained for",
                    self._num_drafts,
                    self._pair.draft_id,
                    self._num_accepted,
                    draft.described,
                )


class ChainRounds(Rounds):
    """Chains, and one verification for those of all requests."""

    def __init__(self, parts: RoundParts, drafter: Drafter) -> None:
        super().__init__(parts.engines)
        self.drafter = drafter
        self._pair = parts.pair
        self._first_tokens = None if self.carried is None else _FirstTokens(parts.pair)
        self._target = target = parts.engines.target
        self._single = target.num_rows == 1
        self._memory = memory = parts.memory
        device = target.lm.device
        self._verified = memory
        if device != memory.probs.device:
            lm = target.lm
            self._verified = DraftMemory(
                memory.most,
                lm.vocab_size,
                lm.probs_dtype,
                device,
                target.num_rows,
                memory.only_compared,
            )
        verification = parts.verification
        # Predictions speak of token verification alone.
        self._expects = isinstance(verification, TokenVerification)
        chosen = parts.warp, verification, self._verified, parts.stopping, self.carried
        self._step = target.compiled_step(VerifyStep(*chosen), all_logits=True)
        joined = JoinedVerifyStep(*chosen)
        self._joined = JoinedStep(target, joined)
        # A single row's number of drafted tokens
        self._length = torch.zeros(1, dtype=torch.long, device=device)

    def take(
        self, requests: Sequence[Request], end_tokens: Tensor, clock: Clock
    ) -> tuple[list[Round], Mark]:
        drafter = self.drafter
        rule = drafter.rule
        drafter.state = rule.start_round(drafter.state)
        drafter.draft(requests, end_tokens)
        drafted = clock.mark()
        results = [self._verify_single(requests[0])] if self._single else self._verify(requests)
        rounds = []
        for request, result in zip(requests, results, strict=True):
            drafter.keep(request, result.num_accepted)
            rounds.append(
                Round(
                    tokens=[*result.draft_tokens[: result.num_accepted], result.next_token],
                    num_drafted=request.num_drafted,
                    num_accepted=result.num_accepted,
                    num_discarded=request.num_drafted - result.num_accepted,
                    num_draft_calls=request.num_draft_calls,
                )
            )
            if result.draft_nan or result.target_nan:
                pair = self._pair
                request.fail_by_nan(pair.draft_id if result.draft_nan else pair.target_id)
        if self._first_tokens is not None:
            self._first_tokens.note(rounds)
        return rounds, drafted

    def _state_to_learn(self) -> State:
        """Return the rule's state on the target's device; nothing of a rule that does not learn."""
        drafter = self.drafter
        return self._moved(drafter.state, self._verified) if drafter.rule.learns else ()

    def _keep_learned(self, state: State) -> None:
        drafter = self.drafter
        if drafter.rule.learns:
            drafter.state = self._moved(state, self._memory)

    def _moved(self, state: State, memory: DraftMemory) -> State:
        """Return a state on the device of a memory."""
        if self._verified is self._memory:
            return state
        device = memory.probs.device
        return tree_map(lambda part: part.to(device), state)

    def _verify_single(self, request: Request) -> "StepResult":
        target = self._target
        memory = self._verified
        base = target.length
        count = request.num_drafted
        if memory is not self._memory:
            memory.copy_(self._memory, count)
        memory.set_last(request.committed[-1])
        self._length.fill_(count)
        tokens, _ = memory.read_from(0, target.padded(count + 1))
        uniforms = request.verify_uniforms.take(2)
        packed, state = self._step(tokens, uniforms, self._length, self._state_to_learn())
        self._keep_learned(state)
        result = StepResult.unpacked(packed.tolist()[0])
        target.rewind(base + 1 + result.num_accepted)
        return result

    def _verify(self, requests: Sequence[Request]) -> list["StepResult"]:
        if self._verified is not self._memory:
            longest = max(request.num_drafted for request in requests)
            self._verified.copy_(self._memory, longest)
        joined = self._joined.join(
            rows=[request.row for request in requests],
            tokens=[[request.committed[-1], *request.drafted] for request in requests],
            starts=[len(request.committed) - 1 for request in requests],
        )
        lengths = joined.counts - 1
        width = self._target.padded_rows(int(lengths.max()) + 1)
        index = joined.first[:, None] + np.minimum(np.arange(width), lengths[:, None])
        uniforms = []
        for request in requests:
            numbers = request.verify_uniforms
            uniforms.append([numbers.number(), numbers.number()])
        columns = [index, joined.rows, np.array(uniforms), lengths]
        packed, state = self._joined(joined, columns, self._state_to_learn())
        self._keep_learned(state)
        return [StepResult.unpacked(each) for each in packed.tolist()[: len(requests)]]

    def warm_up(self, end_tokens: Tensor) -> None:
        self.drafter.warm_up(end_tokens)
        memory = self._verified
        if self._single:
            self._warm_up_verification(range(self.drafter.rule.max_tokens + 1))
            return
        state = self._state_to_learn()

        def inputs(sizes: ExampleSizes) -> tuple[object, ...]:
            count = sizes.num_rows
            index = sizes.zeros(count, sizes.num_columns)
            uniforms = sizes.zeros(count, 2).double()
            return index, sizes.zeros(count), uniforms, sizes.zeros(count), state

        others = [*memory.buffers(), *tree_leaves(state)]
        self._joined.warm_up(inputs, others, memory.most + 1)

    def warm_up_repeated(self, end_tokens: Tensor, verified: Iterable[int]) -> None:
        """Prepare the engines for the drafter's `repeated_steps` of a single row, and for the
        verification of these numbers of drafted tokens.
        """
        self.drafter.warm_up_repeated(end_tokens)
        self._warm_up_verification(verified)

    def _warm_up_verification(self, verified: Iterable[int]) -> None:
        target = self._target
        counts = sorted({target.padded(1 + count) for count in verified})
        inputs = _float_zeros(target, 2), self._length, self._state_to_learn()
        target.warm_up(self._step, counts, *inputs)

    def start(self, requests: Sequence[Request]) -> None:
        self.drafter.start(requests)
        for request in requests:
            read = len(request.committed) - 1 - request.num_skipped
            request.num_read = max(0, read) if len(self.readers) > 1 else 0

    def num_expected(self, request: Request) -> float | None:
        drafter = self.drafter
        expected = drafter.rule.num_expected(drafter.state) if self._expects else None
        return None if expected is None else float(expected[request.row])

    def repeated_verification(self, num_drafted: int) -> Callable[[], object]:
        """Return a call that verifies `num_drafted` tokens of a single row, wherever memory
        ends.
        """
        target = self._target
        memory = self._verified
        memory.probs.fill_(1 / target.lm.vocab_size)
        uniforms = _float_zeros(target, 2)
        tokens, _ = memory.read_from(0, target.padded(num_drafted + 1))
        state = self._state_to_learn()
        return lambda: self._step(tokens, uniforms, self._length, state)


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
    """The epilogue of a verification's forward pass, and what a stopping rule learns from it.

    An engine may compile it.
    """

    def __init__(
        self,
        warp: Warp,
        rule: VerificationRule,
        memory: DraftMemory,
        stopping: StoppingRule,
        carried: CarriedStates | None = None,
    ) -> None:
        self.warp = warp
        self.rule = rule
        self.memory = memory
        self.stopping = stopping
        self.carried = carried
        learned = stopping.compile_key if stopping.learns else None
        written = () if carried is None else carried.compile_key
        self.compile_key = (type(self), warp, rule.compile_key, memory, learned, *written)

    def __call__(
        self, output: ForwardOutput, uniforms: Tensor, lengths: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Return a packed StepResult (1, 4 + K) long after a pass over the last committed token and
        K drafted ones, and the stopping rule's state after this round.

        The state is empty where the rule does not learn.
        """
        draft_tokens = output.tokens[:, 1:]
        draft_probs = self.memory.probs[:, : draft_tokens.shape[1]]
        if self.carried is not None:
            self.carried.write(output)
        if self.memory.only_compared:
            packed = self.compare(draft_tokens, draft_probs, *greedy_tokens(output.logits), lengths)
        else:
            target_probs = self.warp(output.logits)
            packed = self.decide(draft_tokens, draft_probs, target_probs, uniforms[None], lengths)
        if not self.stopping.learns:
            return packed, state
        return packed, self.stopping.end_round(state, lengths, packed[:, 0])

    def decide(
        self,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        uniforms: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """Return packed StepResults (B, 4 + K) long of a Block.

        What lies beyond the length of a draft does not matter. `uniforms` (B, 2) are for the number
        of accepted tokens and for the target's token.
        """
        block = Block.of(draft_tokens, draft_probs, target_probs, lengths)
        decision = self.rule.distribution(block).decide(uniforms[:, 0], uniforms[:, 1])
        # A draft with a reduced output has no NaN at the tokens that it lacks.
        draft_nan = block.drafted_probs()[0].isnan() & block.within
        return _packed(*decision, draft_nan, has_nan(target_probs), draft_tokens)

    def compare(
        self, draft_tokens: Tensor, draft_zero: Tensor, best: Tensor, zero: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return what `decide` does at temperature 0 of a rule that compares tokens with the
        target's most likely ones, `best` (B, K + 1); `zero` (B, K + 1) and `draft_zero` (B, K, 1)
        are NaN where a model's logits were.
        """
        decision = compared(draft_tokens, best, lengths)
        places = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
        draft_nan = has_nan(draft_zero) & (places < lengths[:, None])
        return _packed(*decision, draft_nan, zero.isnan(), draft_tokens)


def _packed(
    num_accepted: Tensor,
    next_token: Tensor,
    draft_nan: Tensor,
    target_nan: Tensor,
    draft_tokens: Tensor,
) -> Tensor:
    """Return packed StepResults (B, 4 + K) long."""
    any_nan = draft_nan.any(dim=1).long(), target_nan.any(dim=1).long()
    decided = torch.stack([num_accepted, next_token, *any_nan], dim=1)
    return torch.cat([decided, draft_tokens], dim=1)


class JoinedVerifyStep(VerifyStep):
    """The epilogue of a verification's forward pass over the drafts of several rows."""

    open_inputs = ((0, 1), (0,), (0,), (0,))

    def __call__(  # type: ignore[override]
        self,
        output: ForwardOutput,
        index: Tensor,
        rows: Tensor,
        uniforms: Tensor,
        lengths: Tensor,
        state: State,
    ) -> tuple[Tensor, State]:
        """Return packed StepResults (n, 4 + K) long for `rows` (n,) long of the memory, and the new
        state of all rows.

        `index` (n, K + 1) says where in the forward pass the last committed token and the drafted
        ones of each row are; after the last drafted one it is repeated.
        """
        num_drafted = index.shape[1] - 1
        draft_tokens = self.memory.sequence[rows, 1 : num_drafted + 1]
        draft_probs = self.memory.probs[rows, :num_drafted]
        logits = output.logits[:, 0]
        if self.carried is not None:
            self.carried.write(output)
        if self.memory.only_compared:
            best, zero = greedy_tokens(logits)
            packed = self.compare(draft_tokens, draft_probs, best[index], zero[index], lengths)
        else:
            target_probs = self.warp(logits)[index]
            packed = self.decide(draft_tokens, draft_probs, target_probs, uniforms, lengths)
        if not self.stopping.learns:
            return packed, state
        before = tree_map(lambda part: part[rows], state)
        after = self.stopping.end_round(before, lengths, packed[:, 0])
        return packed, with_rows(state, rows, after)


def _float_zeros(engine: Engine, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64, device=engine.lm.device)
