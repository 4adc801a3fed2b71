"""What a head adds to a draft step, counted: at batch size 1 a model multiplies and reads each weight once per token."""

from collections.abc import Iterable

from torch import Tensor, nn

from specheads.heads.head import AcceptanceHead
from specheads.pair import LanguageModel


def counted_share(head: AcceptanceHead, draft: LanguageModel) -> float:
    """Return the cost of a head as a share of a draft step: the larger of its shares of multiply-adds and of bytes of weights.

    Attention over earlier tokens and what starting a computation costs are left out, and all experts of a mixture count as used: a head looks
    cheaper beside such a draft than it is.
    """
    (ours, our_bytes), (theirs, their_bytes) = _work(head.parameters()), _work(step_weights(draft))
    return max(ours / theirs, our_bytes / their_bytes)


def step_weights(model: LanguageModel) -> list[Tensor]:
    """Return the weights that a step of a model multiplies by: all but tables that it looks one row up in."""
    output = model.output_embedding.weight
    tables = {part.weight for part in model.model.modules() if isinstance(part, nn.Embedding)} - {output}
    return [weight for weight in model.model.parameters() if weight not in tables]


def _work(weights: Iterable[Tensor]) -> tuple[int, int]:
    """Return the numbers and the bytes of weights."""
    sizes = [(weight.numel(), weight.numel() * weight.element_size()) for weight in weights]
    return sum(count for count, _ in sizes), sum(size for _, size in sizes)
