"""The epilogues of forward passes over rows: those of one text, on some rows of a state and of a memory of all rows."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.decoding.drafting.autoregressive import ChainState, ChainStep
from specheads.decoding.engine import ForwardOutput
from specheads.decoding.verification import VerifyStep
from specheads.sampling import Warp, has_nan


class RowsChainStep:
    """The epilogue of a draft forward pass: a token for each of some rows."""

    open_inputs = ((0,), (0,), (0,), (0,))

    def __init__(self, step: ChainStep) -> None:
        self.step = step
        self.compile_key = (RowsChainStep, *step.compile_key)

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


class RowsVerifyStep:
    """The epilogue of a verification's forward pass over the drafts of some rows."""

    open_inputs = ((0, 1), (0,), (0,), (0,))

    def __init__(self, step: VerifyStep) -> None:
        self.step = step
        self.compile_key = (RowsVerifyStep, *step.compile_key)

    def __call__(
        self, output: ForwardOutput, index: Tensor, rows: Tensor, uniforms: Tensor, lengths: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Return packed StepResults (n, 5 + K) long, the states (n, H) that next tokens were decided from, and the rule's state.

        Args:
            index: (n, K + 1) long, where in the forward pass the last committed token and the drafted ones of each row are; after
                the last drafted one it is repeated.
            rows: (n,) long, rows of the memory and of the state.
            uniforms, lengths: (n, 2) and (n, 3); see `VerifyStep.decide`.
            state: of all rows.
        """
        memory, num_drafted = self.step.memory, index.shape[1] - 1
        draft_tokens = memory.sequence[rows, 1 : num_drafted + 1]
        draft_probs = memory.probs[rows, : num_drafted + int(self.step.rule.reads_next_probs)]
        target_probs = self.step.warp(output.logits[:, 0])[index]
        packed, new = self.step.decide(draft_tokens, draft_probs, target_probs, uniforms, lengths, of_rows(state, rows))
        decided_from = index.gather(1, packed[:, :1]).squeeze(1)
        return packed, output.hidden[decided_from, 0], with_rows(state, rows, new)


class RowsTargetStep:
    """The epilogue of a forward pass of the target alone, over one token of each row."""

    open_inputs = ((0,),)

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.compile_key = (RowsTargetStep, warp)

    def __call__(self, output: ForwardOutput, uniform: Tensor) -> Tensor:
        """Return the next tokens and whether there was a NaN, (N, 2) long, drawn at `uniform` (N,)."""
        probs = self.warp(output.logits[:, 0])
        return torch.stack([self.warp.draw(probs, uniform), has_nan(probs).long()], dim=1)


def of_rows(state: Any, rows: Tensor) -> Any:
    """Return some rows (n,) of a state."""
    return tree_map(lambda part: part[rows], state)


def with_rows(state: Any, rows: Tensor, new: Any) -> Any:
    """Return a state whose `rows` (n,) are those of `new`."""
    return tree_map(lambda part, of_new: part.index_put((rows,), of_new.to(part.dtype)), state, new)
