"""`train.py` with another loss for heads, which `head_kinds.py --compare objectives` runs and compares.

    python benchmarks/head_objectives.py throughput model=mini head.label=rollout generation.rollouts_per_response=4

The first argument names the loss, the others are those of train.py.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

sys.path.insert(0, str(Path(__file__).parents[1]))

from specheads.heads.batch import HeadBatch
from specheads.training.heads import head_training
from specheads.training.heads.head_loss import weighted_bce
from specheads.training.heads.head_module import HeadModule

Loss = Callable[[Tensor, Tensor, HeadBatch], tuple[Tensor, Tensor]]
FOCUS = 2.0  # the exponent of the focal loss
NUM_BINS = 15  # of the calibration error
PRICE = 0.2  # the throughput, in tokens per draft step, of mini at ratio 10: the value of a token that a draft step must yield
SHARPNESS = 4.0  # of the soft decision, per nat of survival
MEAN_ACCEPTANCE = 0.7  # of a token of mini's draft that nothing is known of


def focal(logits: Tensor, labels: Tensor, batch: HeadBatch) -> tuple[Tensor, Tensor]:
    """Return cross-entropy that counts tokens less the better they are predicted (Lin et al. 2017)."""
    known, labels = ~labels.isnan(), labels.nan_to_num(0.0)
    chance = logits.sigmoid()
    losses = labels * (1 - chance) ** FOCUS * softplus(-logits) + (1 - labels) * chance**FOCUS * softplus(logits)
    return (losses * known).sum(), known.sum()


def calibrated(logits: Tensor, labels: Tensor, batch: HeadBatch) -> tuple[Tensor, Tensor]:
    """Return cross-entropy plus the distance of predictions from labels in bins of predictions."""
    total, weight = weighted_bce(logits, labels)
    known = ~labels.isnan()
    chance, labels = logits[known].sigmoid(), labels[known]
    bins = (chance.detach() * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    error = chance.new_zeros(NUM_BINS).index_add_(0, bins, chance - labels.to(chance)).abs().sum()
    return total + error, weight


def throughput(logits: Tensor, labels: Tensor, batch: HeadBatch) -> tuple[Tensor, Tensor]:
    """Return cross-entropy plus what soft decisions to go on lose within rollouts, at a price for a draft step.

    A token of a rollout yields the chance that it and all before it are accepted, and costs the price. It is drafted if no token
    before it stopped the draft, which each does by the survival that the head predicts up to it.
    """
    total, weight = weighted_bce(logits, labels)
    assert batch.alive is not None
    chosen = batch.label.isnan()  # tokens within rollouts
    row, log_chance = batch.row[chosen], logsigmoid(logits[chosen])
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = row[1:] != row[:-1]
    going = SHARPNESS * (before_in_text(log_chance, first) + torch.tensor(MEAN_ACCEPTANCE / PRICE).log())
    log_going = torch.where(first, 0.0, logsigmoid(going))  # the first token is always drafted
    drafted = (before_in_text(log_going, first) + log_going).exp()
    worth = batch.alive[chosen] * labels[chosen] - PRICE
    return total - (drafted * worth).sum() * (weight / first.sum().clamp_min(1)), weight


def before_in_text(values: Tensor, first: Tensor) -> Tensor:
    """Return for each token the sum of the values (n,) of those before it in its text; `first` (n,) marks where texts begin."""
    before = values.cumsum(0) - values
    begins = torch.where(first, torch.arange(len(first), device=first.device), 0).cummax(0).values
    return before - before[begins]


LOSSES: dict[str, Loss] = {"focal": focal, "calibrated": calibrated, "throughput": throughput}


class ObjectiveModule(HeadModule):
    """A bank of heads that learn another loss; their validation is that of every bank."""

    loss: Loss

    def training_step(self, batch: HeadBatch, batch_index: int) -> Tensor:
        logits = self.bank(self.features(batch))
        pairs = [
            type(self).loss(row, read_out.label(batch.labels), batch)
            for row, read_out in zip(logits, self.bank.read_outs, strict=True)
        ]
        sums, weights = zip(*pairs, strict=True)
        return self.loss_of_batch(batch_index, torch.stack(sums), torch.stack(weights))


def main() -> None:
    name = sys.argv.pop(1)
    if name not in LOSSES:
        raise SystemExit(f"{name!r} is not a loss; use {', '.join(LOSSES)}.")
    from specheads.commands import train

    ObjectiveModule.loss = staticmethod(LOSSES[name])  # type: ignore[assignment]
    head_training.HeadModule = ObjectiveModule  # type: ignore[misc]
    train.main()


if __name__ == "__main__":
    main()
