"""The target's forward pass over a draft and its verification, in one compiled step."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specheads.decoding.drafting.draft_memory import DraftMemory
from specheads.decoding.engine import Engine
from specheads.decoding.host_numbers import HostNumbers
from specheads.decoding.records import Draft
from specheads.decoding.verification import VerificationRule, VerifyStep
from specheads.decoding.verification.verify_step import StepResult
from specheads.sampling import Uniforms, Warp


class Outcome(NamedTuple):
    """The outcome of a verification. A named tuple, like other records of a round: a dataclass takes several times as long."""

    path: Sequence[int]  # the accepted nodes, from the context down
    tokens: Sequence[int]  # those of the accepted nodes
    next_token: int  # the target's
    num_probs_needed: int  # coming tokens whose verification needs the draft's distribution
    hidden: Tensor  # (1, N, H), the target's states after the last committed token and after each node
    decided_from: int  # which of them decided the next token
    draft_nan: bool
    target_nan: bool

    @property
    def target_hidden(self) -> Tensor:
        """(1, H), the state that the next token was decided from."""
        return self.hidden[:, self.decided_from]


class Verifier(Protocol):
    """Verifies the drafts of one decoder. The engine's memory ends before the last committed token."""

    def warm_up(self) -> None:
        """Prepare the engine for all that verification runs."""

    def start_prompt(self) -> Any:
        """Return the rule's state at the start of a prompt."""

    def verify(self, last: int, draft: Draft, planned: int, uniforms: Uniforms, state: Any) -> tuple[Outcome, Any]:
        """Verify a draft after the `last` committed token, and keep the accepted part in memory.

        Return the outcome and the rule's new state.

        Args:
            planned: tokens that would have been drafted whatever they are; 0: their number depends on them.
        """


class ChainVerifier:
    """Verifies chains in the memory that they are drafted into, with forward pass and rule in one compiled step."""

    def __init__(self, engine: Engine, warp: Warp, rule: VerificationRule, drafted: DraftMemory, most: int) -> None:
        """`most`: the length of the longest chain."""
        self.engine, self.rule, self._drafted, self._memory = engine, rule, drafted, drafted
        device = engine.lm.device
        if drafted.probs.device != device:
            self._memory = DraftMemory(drafted.most, engine.lm.vocab_size, engine.lm.probs_dtype, device)
        self._most = most
        self._lengths = HostNumbers((3,), device)
        self._compiled_step = engine.compiled_step(VerifyStep(warp, rule, self._memory), all_logits=True)

    def warm_up(self) -> None:
        longest, lengths = self.engine.padded(self._most + 1), self._lengths.tensor
        counts = sorted({self.engine.padded(count) for count in range(1, longest + 1)})
        uniforms = torch.zeros(2, dtype=torch.float64, device=lengths.device)
        self.engine.warm_up(self._compiled_step, counts, uniforms, lengths, self.start_prompt())

    def start_prompt(self) -> Any:
        return self.rule.start_prompt(1, self._lengths.tensor.device)

    def verify(self, last: int, draft: Draft, planned: int, uniforms: Uniforms, state: Any) -> tuple[Outcome, Any]:
        base, num_drafted, memory = self.engine.length, len(draft.tokens), self._memory
        if memory is not self._drafted:
            memory.copy_(self._drafted, num_drafted)
        memory.set_last(last)
        self._lengths.numbers[:] = num_drafted, planned, num_drafted + (draft.next_probs is not None)
        self._lengths.send()
        tokens = memory.start(self.engine.padded(num_drafted + 1))
        packed, hidden, state = self._compiled_step(tokens, uniforms.take(2), self._lengths.tensor, state)
        result = StepResult.unpacked(packed.tolist()[0])
        self.engine.rewind(base + 1 + result.num_accepted)
        outcome = Outcome(
            path=range(result.num_accepted),
            tokens=result.draft_tokens[: result.num_accepted],
            next_token=result.next_token,
            num_probs_needed=result.num_probs_needed,
            hidden=hidden,
            decided_from=result.num_accepted,
            draft_nan=result.draft_nan,
            target_nan=result.target_nan,
        )
        return outcome, state
