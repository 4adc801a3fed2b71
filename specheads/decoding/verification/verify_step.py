"""The step after the target's forward pass over a chain: warp, verification rule, and one tensor with all that the host needs."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.decoding.draft_memory import DraftMemory
from specheads.decoding.engine import ForwardOutput
from specheads.decoding.records import CHAIN, Verdict
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.verification.chain_distribution import AcceptanceDistribution, Block
from specheads.pair.sampling import Warp, has_nan


class Verification:
    """Decides how much of a draft is accepted."""

    name: str  # of its config, conf/verification/<name>.yaml
    label: str  # in reports
    compile_key: Hashable  # rules with equal keys decide alike
    lossless: bool = True  # whether the output follows the target's distribution
    stopping: StoppingRule | None = None  # the default stopping rule
    takes: frozenset[str]  # the kinds of drafts that it can verify
    reads_planned: bool = False  # whether it reads a block's `planned`


class VerificationRule(Verification):
    """Decides how much of a chain is accepted: a state machine on batched tensors, one step per round."""

    takes = frozenset({CHAIN})
    # Whether a block has the draft's distribution after its last token, where `num_probs_needed` asks for it.
    reads_next_probs: bool = False

    def start_prompt(self, batch: int, device: torch.device) -> Any:
        """Return the state at the start of a prompt."""
        raise NotImplementedError

    def __call__(self, state: Any, block: Block, uniform: Tensor, next_uniform: Tensor) -> tuple[Verdict, Any]:
        """Verify a block at given uniform numbers, (B,) each; return the verdict and the state for the next round."""
        raise NotImplementedError


class ChainVerification(VerificationRule):
    """The base of rules for chains that verify every block whatever happened before."""

    def start_prompt(self, batch: int, device: torch.device) -> tuple[()]:
        """Return the state, which is empty."""
        return ()

    def distribution(self, block: Block) -> AcceptanceDistribution:
        """Return the distribution of the outcome."""
        raise NotImplementedError

    def __call__(self, state: Any, block: Block, uniform: Tensor, next_uniform: Tensor) -> tuple[Verdict, Any]:
        return self.distribution(block).decide(uniform, next_uniform), state


class StepResult(NamedTuple):
    """What the host reads after a verification."""

    num_accepted: int
    next_token: int
    num_probs_needed: int
    draft_nan: bool
    target_nan: bool
    draft_tokens: Sequence[int]  # padding included

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> "StepResult":
        """Return the result that a VerifyStep packed into one tensor."""
        num_accepted, next_token, num_probs_needed, draft_nan, target_nan, *draft_tokens = numbers
        return cls(num_accepted, next_token, num_probs_needed, bool(draft_nan), bool(target_nan), draft_tokens)


class VerifyStep:
    """The epilogue of a verification's forward pass. An engine may compile it."""

    def __init__(self, warp: Warp, rule: VerificationRule, memory: DraftMemory) -> None:
        """`memory`: in which drafts come."""
        self.warp, self.rule, self.memory = warp, rule, memory
        self.compile_key = (VerifyStep, warp, rule.compile_key, memory)

    def __call__(self, output: ForwardOutput, uniforms: Tensor, lengths: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """Return a packed StepResult (1, 5 + K) long, the target's hidden states (1, 1 + K, H) and the rule's new state.

        The forward pass read the last committed token and K drafted ones; `decide` describes `uniforms` (2,) and `lengths` (3,).
        """
        draft_tokens = output.tokens[:, 1:]
        draft_probs = self.memory.probs[:, : draft_tokens.shape[1] + int(self.rule.reads_next_probs)]
        target_probs = self.warp(output.logits)
        packed, state = self.decide(draft_tokens, draft_probs, target_probs, uniforms[None], lengths[None], state)
        return packed, output.hidden, state

    def decide(
        self, draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor, lengths: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        """Return packed StepResults (B, 5 + K) long and the rule's new state.

        Args:
            draft_tokens, draft_probs, target_probs: see Block; those beyond the length of a draft do not matter.
            uniforms: (B, 2), for the number of accepted tokens and for the target's token.
            lengths: (B, 3) long: the drafted tokens, the planned ones (see Block), and the draft's distributions.
        """
        num_drafted, planned, num_probs = lengths.unbind(dim=1)
        block = Block.of(draft_tokens, draft_probs, target_probs, num_drafted, planned)
        verdict, state = self.rule(state, block, uniforms[:, 0], uniforms[:, 1])
        num_probs_needed = verdict.num_probs_needed
        if num_probs_needed is None:
            num_probs_needed = torch.zeros_like(verdict.num_accepted)
        written = torch.arange(draft_probs.shape[1], device=lengths.device) < num_probs[:, None]
        nans = [(has_nan(draft_probs) & written).any(dim=1).long(), has_nan(target_probs).any(dim=1).long()]
        numbers = torch.stack([verdict.num_accepted, verdict.next_token, num_probs_needed, *nans], dim=1)
        return torch.cat([numbers, draft_tokens], dim=1), state
