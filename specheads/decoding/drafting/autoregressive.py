"""One token after the other, each sampled from the draft's warped distribution."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.decoding.arguments import check_flag
from specheads.decoding.drafting.draft_memory import DraftMemory
from specheads.decoding.drafting.drafter import Drafting
from specheads.decoding.engine import Engine, ForwardOutput
from specheads.decoding.host_numbers import HostNumbers
from specheads.decoding.records import Draft
from specheads.decoding.stopping import StoppingRule
from specheads.features import drafting_features
from specheads.language_model import LanguageModel
from specheads.sampling import Uniforms, Warp

PENDING = (1, 2)  # committed tokens that a round's first step reads: two after a fully accepted draft


class Autoregressive(Drafting):
    """`drafting=autoregressive`: a chain, as long as the stopping rule lets it grow.

    Args:
        ahead: issue each step before the previous step's stop flag has arrived, and drop its token if the flag says stop. The
            tokens are the same; a round has one forward pass more, which pays where waiting for a flag costs more than a forward
            pass.
    """

    def __init__(self, ahead: bool = False) -> None:
        check_flag("drafting.ahead", ahead)
        self.ahead = ahead

    def drafter(self, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> "ChainDrafter":
        """Return the drafter for these choices, which writes into `memory`."""
        return ChainDrafter(engine, ChainStep(engine.lm, warp, rule, memory), self.ahead)


class ChainState(NamedTuple):
    """The state that each step passes on to the next."""

    stopped: Tensor  # (B,) bool, whether the draft ended before this step, which then passes the state on unchanged
    rule: Any  # of the stopping rule, tensors (B, ...)


class ChainStep:
    """The epilogue of a draft forward pass: warp, sample, features, stopping rule. An engine may compile it."""

    updates_last_input = True

    def __init__(self, lm: LanguageModel, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> None:
        self.lm, self.warp, self.rule, self.memory = lm, warp, rule, memory
        self.compile_key = (ChainStep, warp, rule.compile_key, memory)

    def __call__(self, output: ForwardOutput, index: Tensor, uniform: Tensor, ends: Tensor, state: ChainState) -> ChainState:
        """Write the drafted token and its distribution into the memory; return the new state: `stopped` if the draft ends there.

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


class ChainDrafter:
    """Drafts chains into a memory."""

    def __init__(self, engine: Engine, step: ChainStep, ahead: bool = False) -> None:
        self._engine, self._rule, self._memory = engine, step.rule, step.memory
        self._step, self._ahead = engine.compiled_step(step), ahead
        device = engine.lm.device
        self._going, self._stopped = torch.tensor([[False], [True]], device=device)
        self._flag = Flag(device)
        self._pending = [HostNumbers((1, count), device) for count in PENDING]

    def warm_up(self, ends: Tensor) -> None:
        """Prepare the engine for all that drafting runs."""
        uniform = torch.zeros(1, dtype=torch.float64, device=ends.device)
        state = ChainState(self._going, self._rule.start_prompt(1, ends.device))
        self._engine.warm_up(self._step, PENDING, self._memory.indices[0], uniform, ends, state)

    def draft(
        self, committed: Sequence[int], state: Any, limit: int, uniforms: Uniforms, ends: Tensor, num_probs_needed: int = 0
    ) -> Draft:
        """Return a draft of at most `limit` tokens after the committed ones; see Drafter."""
        memory, calls, limit, self._base = self._memory, 0, min(limit, self._rule.max_tokens), len(committed)
        tokens = self._unread(committed, ends.device)
        count, state = 0, ChainState(self._going, state)
        while count < limit:
            state = self._step(tokens, memory.indices[count], uniforms.take(1), ends, state)
            calls += 1
            if self._ahead and count and self._flag.read():
                uniforms.give_back(1)
                break
            tokens, count = memory.drafted(count), count + 1
            if self._ahead:
                self._flag.send(state.stopped)
            elif self._flag.wait_for(state.stopped):
                break
        needs_next = num_probs_needed > count
        if needs_next and calls == count:  # only the distribution matters, the state stays as it is
            state = self._step(tokens, memory.indices[count], uniforms.take(1), ends, ChainState(self._stopped, state.rule))
            uniforms.give_back(1)
            calls += 1
        self._state, self._count = state.rule, count
        return memory.chain(count, calls, needs_next)

    def _unread(self, committed: Sequence[int], device: torch.device) -> Tensor:
        """Return the committed tokens (1, n) that the draft has not read."""
        unread = committed[self._engine.length :]
        if len(unread) not in PENDING:
            return torch.tensor([unread], device=device)
        pending = self._pending[PENDING.index(len(unread))]
        pending.numbers[0] = unread
        pending.send()
        return pending.tensor

    def after(self, path: Sequence[int]) -> tuple[Any, int, int]:
        """Return the stopping rule's state and the numbers of drafted and accepted tokens, after `path` was accepted."""
        return self._state, self._count, len(path)

    def keep(self, path: Sequence[int]) -> None:
        """Forget the last draft except for the accepted tokens `path`."""
        self._engine.rewind(min(self._engine.length, self._base + len(path)))


class Flag:
    """A bool on its way from a device to the host; the host waits for it only when it reads."""

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        self._flag = torch.zeros(1, dtype=torch.bool, pin_memory=device.type == "cuda")

    def send(self, flag: Tensor) -> None:
        """Send the current value of `flag` (1,), which may be overwritten afterwards."""
        self._flag.copy_(flag, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(flag.device))

    def wait_for(self, flag: Tensor) -> bool:
        """Return the value of `flag` (1,) as soon as the device has it, and not what it does afterwards."""
        if self._arrived is None:
            return bool(flag.item())
        self.send(flag)
        return self.read()

    def read(self) -> bool:
        """Return the value that was sent last."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._flag)
