"""The cost of a head, counted from weights: at batch size 1 a model reads each weight and multiplies by it once per token."""

from collections.abc import Iterable

from torch import Tensor, nn

from specheads.heads.head import AcceptanceHead
from specheads.pair.language_model import LanguageModel


def counted_share(head: AcceptanceHead, draft: LanguageModel) -> float:
    """Return the cost of a head as a share of a draft step: the larger of its shares of multiply-adds and of bytes of weights.

    Attention over earlier tokens and the time to launch a computation are left out. All experts of a mixture count as used, so
    next to such a draft a head looks cheaper than it is. A read-out of the expected acceptance does not count: stopping rules do
    not compute it.
    """
    unused = set() if head.overlap is None else set(head.overlap.parameters())
    computed = [weight for weight in head.parameters() if weight not in unused]
    (head_count, head_bytes), (draft_count, draft_bytes) = _size(computed), _size(step_weights(draft))
    return max(head_count / draft_count, head_bytes / draft_bytes)


def step_weights(model: LanguageModel) -> list[Tensor]:
    """Return the weights that a step of a model multiplies by: all except tables in which it looks up one row."""
    output = model.output_embedding.weight
    tables = {part.weight for part in model.model.modules() if isinstance(part, nn.Embedding)} - {output}
    return [weight for weight in model.model.parameters() if weight not in tables]


def _size(weights: Iterable[Tensor]) -> tuple[int, int]:
    """Return the count and the bytes of weights."""
    sizes = [(weight.numel(), weight.numel() * weight.element_size()) for weight in weights]
    return sum(count for count, _ in sizes), sum(size for _, size in sizes)
