"""How drafts are proposed: the interface of drafting methods, and chains."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from specheads.decoding.engine import Engine, ForwardOutput
from specheads.decoding.records import CHAIN, short_repr
from specheads.decoding.request import Request
from specheads.decoding.rounds import ChainRounds, Drafter, RoundParts, Rounds
from specheads.decoding.step_inputs import (
    DraftMemory,
    ExampleSizes,
    JoinedStep,
    with_rows,
)
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.stopping.rule import State, unless
from specheads.decoding.verification import TokenVerification, Verification
from specheads.errors import UserError
from specheads.heads.features import drafting_features, reads_logits
from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, active, greedy_tokens
from specheads.settings import check_arguments


class Drafting:
    """`drafting=`: how tokens are proposed.

    A new method is a subclass that the `_target_` of a file in conf/drafting/ names.
    """

    reads_draft = True  # whether a draft model is run
    reads_states = False  # whether that may read states of the target
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


class Autoregressive(Drafting):
    """`drafting=autoregressive`: a chain, as long as the stopping rule lets it grow."""

    reads_states = True

    def rounds(self, parts: RoundParts) -> ChainRounds:
        engine = parts.engines.draft
        drafter = SingleDrafter if engine.num_rows == 1 else JoinedDrafter
        return ChainRounds(parts, drafter(parts, engine))


class ChainState(NamedTuple):
    """The state that each step passes on to the next."""

    stopped: Tensor  # (B,) bool, whether the draft has ended; then steps change nothing here
    rule: State


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
        self.compile_key = (type(self), warp, rule.compile_key, memory)

    def __call__(
        self,
        output: ForwardOutput,
        index: Tensor,
        uniform: Tensor,
        end_tokens: Tensor,
        state: ChainState,
    ) -> ChainState:
        """Write the drafted token and its distribution into the memory, at `index` (1,).

        Return the new state; see `draw`.
        """
        token, probs, state = self.draw(
            output.kept_logits[:, -1], output.hidden[:, -1], index, uniform, end_tokens, state
        )
        self.memory.write(index, token, probs)
        return state

    def draw(
        self,
        kept_logits: Tensor,
        hidden: Tensor,
        index: Tensor,
        uniform: Tensor,
        end_tokens: Tensor,
        state: ChainState,
    ) -> tuple[Tensor, Tensor, ChainState]:
        """Return the tokens (B,) sampled from logits (B, V_kept) of those that the draft's output
        has, their distributions (B, V), of which the memory may need the first numbers (B, 1)
        alone, and the new state.

        The logits are of the states `hidden` (B, H), `index` (B,) says which tokens of their drafts
        these are, `uniform` (B,) in [0, 1) samples, and tokens of `end_tokens` (V,) bool end
        drafts.
        """
        lm = self.lm
        if self.memory.only_compared:
            place, zero = greedy_tokens(kept_logits)
            probs = zero[:, None]
        else:
            of_kept = self.warp(kept_logits)
            place = self.warp.draw(of_kept, uniform)
            probs = lm.spread(of_kept, 0.0)
        token = lm.tokens_at(place)
        needs = self.rule.needs
        features = drafting_features(
            needs,
            lm.spread(kept_logits) if reads_logits(needs) else kept_logits,
            token,
            hidden,
            lm.embed,
            lm.kept_tokens,
            active().softmax_sums,
            index,
        )
        new, stop = self.rule.step(state.rule, features)
        kept = unless(state.stopped, state.rule, new)
        return token, probs, ChainState(state.stopped | stop | end_tokens[token], kept)


class JoinedChainStep(ChainStep):
    """The epilogue of a draft forward pass over several rows: a token for each of some of them."""

    open_inputs = ((0,), (0,), (0,), (0,))
    updates_last_input = False

    def __call__(  # type: ignore[override]
        self,
        output: ForwardOutput,
        last: Tensor,
        rows: Tensor,
        index: Tensor,
        uniform: Tensor,
        end_tokens: Tensor,
        state: ChainState,
    ) -> tuple[Tensor, ChainState]:
        """Return the drafted tokens and whether their drafts end with them, (n, 2) long, and the
        new state of all rows.

        `last` (n,) says where in the forward pass each row's last token is, `index` (n,) which
        token of its draft it gets; `rows` (n,) are those of the memory and of `state`. All are
        long; for the others see `draw`.
        """
        logits = output.kept_logits[last, -1]
        hidden = output.hidden[last, -1]
        before = tree_map(lambda part: part[rows], state)
        token, probs, new = self.draw(logits, hidden, index, uniform, end_tokens, before)
        self.memory.write(index, token, probs, rows)
        return torch.stack([token, new.stopped.long()], dim=1), with_rows(state, rows, new)


class SingleDrafter(Drafter):
    """Drafts chains of an engine whose memory has one text."""

    def __init__(self, parts: RoundParts, engine: Engine) -> None:
        super().__init__(engine, parts.stopping)
        self._memory = parts.memory
        step = ChainStep(parts.pair.draft_lm, parts.warp, parts.stopping, parts.memory)
        self._step = engine.compiled_step(step)
        self._going = torch.tensor([False], device=engine.lm.device)
        self._skipped = engine.lm.num_skipped
        # Committed tokens that a round's first step reads: two after a fully accepted draft. Next
        # to the target's states, all tokens of the round before are read again.
        self._pending = [1, 2]
        if self._skipped:
            most = parts.stopping.max_tokens + 1
            self._pending = [1, *(engine.padded(count) for count in range(2, most + 1))]

    def warm_up(self, end_tokens: Tensor) -> None:
        self._warm_up(sorted(set(self._pending)), end_tokens)

    def warm_up_repeated(self, end_tokens: Tensor) -> None:
        self._warm_up((1,), end_tokens)

    def _warm_up(self, counts: Sequence[int], end_tokens: Tensor) -> None:
        uniform = torch.zeros(1, dtype=torch.float64, device=end_tokens.device)
        state = ChainState(self._going, self.state)
        index = self._memory.indices[0]
        self._engine.warm_up(self._step, counts, index, uniform, end_tokens, state)

    def draft(self, requests: Sequence[Request], end_tokens: Tensor) -> None:
        (request,) = requests
        engine = self._engine
        memory = self._memory
        uniforms = request.draft_uniforms
        unread = self._unread(request.committed)
        # A single token has no state before it that a draft could read.
        most = min(self.rule.max_tokens, request.most_drafted) if unread else 0
        count = 0
        has_stopped = False
        state = ChainState(self._going, self.state)
        if most and len(unread) > 1:
            tokens = torch.tensor([unread], device=self._going.device)
            state = self._step(tokens, memory.indices[0], uniforms.take(1), end_tokens, state)
            count = 1
            has_stopped = bool(state.stopped)
        memory.set_last(request.committed[-1])
        while count < most and not has_stopped:
            numbers = uniforms.take_up_to(most - count)
            tokens, index = memory.read_from(count, len(numbers))
            run, state = engine.repeat(self._step, tokens, [index, numbers], end_tokens, state)
            uniforms.give_back(len(numbers) - run)
            count += run
            has_stopped = bool(state.stopped)
        request.num_drafted = request.num_draft_calls = count
        self.state = state.rule

    def _unread(self, committed: Sequence[int]) -> Sequence[int]:
        """Return the committed tokens that the next step reads.

        Several next to the target's states are as many as the engine has a step for, if the text is
        long enough: the first of them are read again.
        """
        engine = self._engine
        start = engine.length + self._skipped
        if self._skipped and len(committed) - start > 1:
            wanted = len(committed) - engine.padded(len(committed) - start)
            if self._skipped <= wanted < start:
                start = wanted
                engine.pretend(start - self._skipped)
        return committed[start:]

    def keep(self, request: Request, num_accepted: int) -> None:
        engine = self._engine
        engine.rewind(min(engine.length, self.num_kept(request, num_accepted)))

    def repeated_steps(self, count: int) -> Callable[[], None]:
        engine = self._engine
        device = engine.lm.device
        uniforms = torch.zeros(count, dtype=torch.float64, device=device)
        end_tokens = torch.zeros(engine.lm.vocab_size, dtype=torch.bool, device=device)
        state = ChainState(self._going, self.rule.start_prompt(1, device))
        tokens, index = self._memory.read_from(0, count)

        def draft() -> None:
            columns = [index, uniforms]
            engine.repeat(self._step, tokens, columns, end_tokens, state, least=count)

        return draft


class JoinedDrafter(Drafter):
    """Drafts chains of an engine whose memory has several texts, each step one token in every row
    whose draft has not ended.
    """

    def __init__(self, parts: RoundParts, engine: Engine) -> None:
        super().__init__(engine, parts.stopping)
        self._memory = parts.memory
        step = JoinedChainStep(parts.pair.draft_lm, parts.warp, parts.stopping, parts.memory)
        self._step = JoinedStep(engine, step)
        self._going = torch.zeros(engine.num_rows, dtype=torch.bool, device=engine.lm.device)
        self._skipped = engine.lm.num_skipped

    def warm_up(self, end_tokens: Tensor) -> None:
        state = ChainState(self._going, self.state)

        def inputs(sizes: ExampleSizes) -> tuple[object, ...]:
            last, rows, index = (sizes.zeros(sizes.num_rows) for _ in range(3))
            return last, rows, index, last.double(), end_tokens, state

        others = [end_tokens, *tree_leaves(state), *self._memory.buffers()]
        self._step.warm_up(inputs, others)

    def draft(self, requests: Sequence[Request], end_tokens: Tensor) -> None:
        state = ChainState(self._going, self.state)
        for request in requests:
            request.drafted = []
            request.num_draft_calls = 0
        drafting = self._with_room(requests)
        if self._skipped:  # a single token has no state before it that a draft could read
            drafting = [each for each in drafting if len(each.committed) > self._skipped]
        while drafting:
            unread = [request.unread for request in drafting]
            joined = self._step.join(
                rows=[request.row for request in drafting],
                tokens=unread,
                starts=[request.num_read for request in drafting],
            )
            index = np.array([len(request.drafted) for request in drafting])
            uniforms = np.array([request.draft_uniforms.number() for request in drafting])
            columns = [joined.last, joined.rows, index, uniforms]
            drawn, state = self._step(joined, columns, end_tokens, state)
            going = []
            # What fills the step up comes after the requests' tokens.
            results = zip(drafting, unread, drawn.tolist(), strict=False)
            for request, tokens, (token, has_stopped) in results:
                request.num_read += len(tokens)
                request.num_draft_calls += 1
                request.drafted.append(token)
                if not has_stopped:
                    going.append(request)
            drafting = self._with_room(going)
        for request in requests:
            request.num_drafted = len(request.drafted)
        self.state = state.rule

    def _with_room(self, requests: Sequence[Request]) -> list[Request]:
        most = self.rule.max_tokens
        return [each for each in requests if len(each.drafted) < min(each.most_drafted, most)]

    def keep(self, request: Request, num_accepted: int) -> None:
        # Positions beyond what was read are overwritten.
        request.num_read = min(request.num_read, self.num_kept(request, num_accepted))


def check_pairing(drafting: Drafting, rule: Verification) -> None:
    """Raise UserError for a rule that cannot verify such drafts."""
    if drafting.kind not in rule.takes:
        raise UserError(
            f"{rule.label} does not take what {type(drafting).__name__} drafts, {drafting.kind};"
            f" use for example verification={drafting.usual_verification().name}."
        )
