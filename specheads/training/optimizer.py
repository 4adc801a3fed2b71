"""The settings of optimizers, and the learning rate over the steps of a training."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from specheads.settings import NonNegativeNumber, PositiveNumber, Probability, Settings, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LR_TIMES_WIDTH = 0.16  # the learning rate that was best for nano's draft, times its width; updates of wider layers add up


class Optimizer(Settings):
    """AdamW with a linear warm-up and a cosine to zero (SpecDec++, appendix)."""

    lr: PositiveNumber = setting(3e-3, "AdamW's highest learning rate; it falls to 0 as a cosine")
    weight_decay: NonNegativeNumber = setting(0.01, "AdamW's weight decay; 0: none")
    warmup_share: Probability = setting(0.03, "the share of all steps in which the learning rate rises; 0: none")


class DraftOptimizer(Settings):
    """The same for a whole draft, whose default learning rate depends on its width."""

    lr: PositiveNumber | None = setting(
        None, "AdamW's highest learning rate; it falls to 0 as a cosine; null: 0.16 / the draft's hidden size"
    )
    weight_decay: NonNegativeNumber = setting(0.0, "AdamW's weight decay; 0: none")
    warmup_share: Probability = setting(0.03, "the share of all steps in which the learning rate rises; 0: none")

    def for_width(self, width: int) -> "DraftOptimizer":
        """Return the settings for a model whose hidden states have `width` numbers."""
        return self.but(lr=LR_TIMES_WIDTH / width) if self.lr is None else self

    def optimizer_of(self, draft: "PreTrainedModel") -> torch.optim.Optimizer:
        """Return the optimizer of a draft's weights; `lr` is given."""
        weights = [weight for weight in draft.parameters() if weight.requires_grad]
        return torch.optim.AdamW(weights, lr=float(self.lr or 0), weight_decay=self.weight_decay)


def cosine_after_warmup(num_steps: int, warmup_share: float) -> Callable[[int], float]:
    """Return the learning rate's share of its peak by step."""
    warmup = max(1, math.ceil(num_steps * warmup_share))

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, num_steps - warmup))))

    return share
