"""What follows the target's forward over a draft: warp, verification rule, and all that the host has to know in one tensor."""

from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from specheads.decoding.engine import ForwardOutput
from specheads.decoding.records import DraftKind, Verdict
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.verification.chain_distribution import AcceptanceDistribution, Block
from specheads.sampling import Warp


class VerificationRule(Protocol):
    """What decides how much of a chain stands: a state machine on batched tensors, one step per round."""

    lossless: bool  # whether what comes out follows the target's law
    label: str  # what reports call it
    compile_key: Hashable  # rules of equal programs decide alike
    stopping: StoppingRule | None  # when to stop drafting unless another rule is chosen
    takes: frozenset[DraftKind]  # drafts that it can judge
    reads_next_probs: bool  # whether a block has the draft's law after its last token, where it owes that

    def init(self, batch: int, device: torch.device) -> Any:
        """Return the state at the start of a prompt."""

    def __call__(self, state: Any, block: Block, draw: Tensor, next_draw: Tensor) -> tuple[Verdict, Any]:
        """Judge a block at given uniform numbers, (B,) each; return the verdict and the state for the next round."""


class ChainVerification:
    """A rule that judges every block by a law of its own, whatever happened before."""

    lossless = True
    stopping = None
    reads_next_probs = False
    takes = frozenset({DraftKind.CHAIN})

    def init(self, batch: int, device: torch.device) -> tuple[()]:
        return ()

    def distribution(self, block: Block) -> AcceptanceDistribution:
        raise NotImplementedError

    def __call__(self, state: Any, block: Block, draw: Tensor, next_draw: Tensor) -> tuple[Verdict, Any]:
        return self.distribution(block).decide(draw, next_draw), state


NUM_FACTS = 5  # number accepted, next token, tokens owed, NaN in the draft's law, NaN in the target's


class VerifyStep:
    """Tensors in, tensors out: an engine may compile it."""

    def __init__(self, warp: Warp, rule: VerificationRule, most: int) -> None:
        """`most`: rows of the memory that drafts come in."""
        self.warp, self.rule = warp, rule
        self.compile_key = (VerifyStep, warp, rule.compile_key, most)

    def __call__(
        self, output: ForwardOutput, draft_probs: Tensor, draws: Tensor, lengths: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Return NUM_FACTS numbers and the drafted tokens (NUM_FACTS + K,) long, of a forward over the last token and K drafted; the
        target's hidden states (1, 1 + K, H); and the rule's new state.

        Args:
            draft_probs: memory for `most` > K rows (most, V); what is beyond the length of a draft does not matter.
            draws: (2,), for the number of accepted tokens and for the target's own token.
            lengths: (3,) long, the tokens that were drafted, those planned (see Block), and the draft's laws.
        """
        draft_tokens, target_probs = output.tokens[:, 1:], self.warp(output.logits)
        num_drafted = draft_tokens.shape[1]
        draft_probs = draft_probs[None, : num_drafted + self.rule.reads_next_probs]
        block = Block.of(draft_tokens, draft_probs, target_probs, lengths[:1], lengths[1:2])
        verdict, state = self.rule(state, block, draws[:1], draws[1:])
        num_probs_needed = (
            torch.zeros_like(verdict.num_accepted) if verdict.num_probs_needed is None else verdict.num_probs_needed
        )
        written = torch.arange(draft_probs.shape[1], device=lengths.device) < lengths[2:]
        draft_nan = (draft_probs.isnan().any(dim=-1) & written).any(dim=1).long()
        nans = [draft_nan, target_probs.isnan().any().reshape(1).long()]
        facts = torch.cat([verdict.num_accepted, verdict.next_token, num_probs_needed, *nans, draft_tokens[0]])
        return facts, output.hidden, state
