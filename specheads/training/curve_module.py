"""The base of all trained modules: a loss over a whole optimizer step, and curves that a checkpoint
holds.
"""

import math
from collections.abc import Callable, Sequence

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from specheads.training.settings import Optimizer


class CurveModule(L.LightningModule):
    """A module whose loss is `sum of weighted losses / sum of weights` over a whole optimizer step,
    of all processes.

    The second sum is known only at the end of the step, so batches are divided by the weights of
    its first batch, and gradients are corrected before they are clipped. Curves are in checkpoints,
    because a log file may be older or newer than those.
    """

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[int, dict[str, float]]] = []
        # What decides which epoch of each model is exported, by the last validation: the smaller,
        # the better
        self.dev_values: dict[str, float] = {}
        # Each batch of this step, over all processes (2, n + m), see `loss_of_batch`.
        self._sums: list[Tensor] = []
        self._num_losses = 0
        self._history_is_logged = False

    def loss_of_batch(
        self, batch_index: int, losses: Tensor, weights: Tensor, measures: Tensor | None = None
    ) -> Tensor:
        """Return a batch's loss from (n,) sums of losses and of weights.

        `measures` (2, m) are recorded, but not learned from.
        """
        del self._sums[batch_index % self.trainer.accumulate_grad_batches :]
        self._num_losses = len(losses)
        counts = self.trainer.datamodule.has_rows("train", batch_index)
        losses = losses * counts
        sums = torch.stack([losses.detach(), weights])
        sums = (sums if measures is None else torch.cat([sums, measures], dim=1)) * counts
        self._sums.append(self.all_gather(sums).reshape(-1, *sums.shape).sum(0))
        # Gradients are averaged over processes, so losses are divided by the mean weights of a
        # process.
        return (losses / (self._first_weights() / self.trainer.world_size)).sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Correct the gradients of a step of several batches, and add its losses and measures to
        the curves.
        """
        sums, weights = torch.stack(self._sums).sum(0)
        weights = _or_one(weights)
        count = self.trainer.accumulate_grad_batches
        # Lightning has divided every batch by it, even in an epoch's last step, which may have
        # fewer batches.
        if count > 1:
            self.scale_gradients(count * self._first_weights() / weights[: self._num_losses])
        values = sums / weights
        if self.global_step % self.trainer.log_every_n_steps == 0:
            named = self.named_values(values.tolist())
            self.record({f"train/{name}": value for name, value in named.items()})

    def _first_weights(self) -> Tensor:
        return _or_one(self._sums[0][1, : self._num_losses])

    def scheduled(
        self, optimizer: torch.optim.Optimizer, settings: Optimizer
    ) -> OptimizerLRScheduler:
        """Return an optimizer with the schedule of its learning rate, for
        `configure_optimizers`.
        """
        share = cosine_after_warmup(self.trainer.estimated_stepping_batches, settings.warmup_share)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def scale_gradients(self, factors: Tensor) -> None:
        """Multiply the gradients of each loss's parameters by its factor (n,)."""
        raise NotImplementedError

    def trained_weights(self, names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return the weights of some models by parameter; all processes call it."""
        raise NotImplementedError

    def named_values(self, values: Sequence[float]) -> dict[str, float]:
        """Return a step's losses and measures (n + m,) by their names."""
        raise NotImplementedError

    def record(self, metrics: dict[str, float], beforehand: bool = False) -> None:
        """Add a point to the curves, at the number of optimizer steps done.

        Callbacks see it too once training has begun.
        """
        self.history.append((self.global_step, {"epoch": self.current_epoch, **metrics}))
        for logger in self.loggers:
            logger.log_metrics(self.history[-1][1], self.global_step)
        if not beforehand:
            self.log_dict(metrics, logger=False)

    def log_history(self) -> None:
        """Write the curves of the resumed run; W&B has kept those from before the interruption."""
        self._history_is_logged = True
        for step, metrics in self.history:
            for logger in self.loggers:
                if isinstance(logger, CSVLogger):  # it empties its file at the start
                    logger.log_metrics(metrics, step)

    def on_fit_end(self) -> None:
        """Write the curves of a run whose training was finished before it was interrupted: no step
        is taken again.
        """
        if not self._history_is_logged:
            self.log_history()

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.history = checkpoint["history"]


def cosine_after_warmup(num_steps: int, warmup_share: float) -> Callable[[int], float]:
    """Return the learning rate's share of its peak, by step."""
    warmup = max(1, math.ceil(num_steps * warmup_share))

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return 0.5 * (1 + math.cos(math.pi * progress))

    return share


def _or_one(weights: Tensor) -> Tensor:
    """Return weights with 1 in place of 0: a loss without weight in a batch or a step is 0 in
    it.
    """
    return torch.where(weights > 0, weights, 1.0)
