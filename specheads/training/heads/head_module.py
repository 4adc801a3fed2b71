"""Training heads with Lightning: a bank on a frozen draft, and on its target where the draft reads
that; they are in no checkpoint.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, islice

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from specheads.errors import UserError
from specheads.heads.batch import HeadBatch, head_features
from specheads.heads.head import LEAST_SPREAD
from specheads.heads.metrics import prediction_metrics
from specheads.pair.pair import Pair
from specheads.training.curve_module import CurveModule
from specheads.training.heads.bank import HeadBank, constant_loss
from specheads.training.settings import Optimizer


class HeadModule(CurveModule):
    """A bank of heads, their weighted loss, and the metrics of their predictions."""

    def __init__(self, bank: HeadBank, pair: Pair, optimizer: Optimizer) -> None:
        super().__init__()
        self.bank = bank
        self.optimizer = optimizer
        self.pair = pair  # no module, so that its weights are not registered as this one's
        self._collected: list[tuple[Tensor, Tensor, Tensor]] = []  # see `_collect`
        self.test_results: dict[str, dict[str, float]] = {}
        # On dev prompts, of the best prediction that is the same everywhere
        self.constant_losses: dict[str, float] = {}

    def features(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the features of a batch that the bank reads."""
        needs = self.bank.needs
        features = {name: batch.features[name] for name in needs & batch.features.keys()}
        if missing := needs - features.keys():
            features |= head_features(self.pair, batch, self.bank.predicts, missing)
        return features

    def on_fit_start(self) -> None:
        """Move the draft, and a target that it reads, to the device of the heads.

        Fix the scale of look-ahead inputs from the first batches.
        """
        self.pair.draft.to(self.device)
        if self.pair.draft_lm.reads_layers and self.pair.target.device != self.device:
            self.pair.target.to(self.device)
        if self.bank.predicts == "next_token" and self.trainer.ckpt_path is None:
            batches = self.trainer.datamodule.batches("train", shared=False)
            parts = [self.features(batch.to(self.device)) for batch in islice(batches, 8)]
            columns = {}
            for name in parts[0]:
                columns[name] = torch.cat([part[name] for part in parts])
            self.bank.standardise(columns)
        self.log_history()

    def training_step(self, batch: HeadBatch, batch_index: int) -> Tensor:
        return self.loss_of_batch(
            batch_index, *self.bank.losses(self.bank(self.features(batch)), batch.label)
        )

    def scale_gradients(self, factors: Tensor) -> None:
        self.bank.scale_gradients(factors)

    def named_values(self, values: Sequence[float]) -> dict[str, float]:
        names = [f"{spec.name}/loss" for spec in self.bank.specs]
        return dict(zip(names, values, strict=True))

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Limit the gradient of each head separately, so that it learns as if it were trained
        alone.
        """
        if gradient_clip_val and gradient_clip_algorithm in (None, "norm"):
            self.bank.clip_gradients(gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def validation_step(self, batch: HeadBatch, batch_index: int) -> None:
        self._collect("dev", batch, batch_index)

    def on_validation_epoch_end(self) -> None:
        logits, labels, sums = self._gathered()
        losses, weights = sums
        of_heads = (losses / weights).tolist()
        values = self.named_values(of_heads) | self._measured(logits, labels)
        for spec, loss in zip(self.bank.specs, of_heads, strict=True):
            self.dev_values[spec.name] = loss
            self.constant_losses[spec.name] = constant_loss(labels, spec.reject_weight)
        metrics = {f"dev/{name}": value for name, value in values.items()}
        self.record(metrics)

    def trained_weights(self, names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        heads = self.bank.heads
        weights = {}
        for name in names:  # heads of a stack share the scale of their inputs
            state = heads[name].state_dict()
            weights[name] = {key: weight.clone() for key, weight in state.items()}
        return weights

    def load_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Set the weights of heads, by name and parameter."""
        heads = self.bank.heads  # they share the bank's memory
        for name, of_head in weights.items():
            heads[name].load_state_dict(of_head)

    def test_step(self, batch: HeadBatch, batch_index: int) -> None:
        self._collect("test", batch, batch_index)

    def on_test_epoch_end(self) -> None:
        logits, labels, _ = self._gathered()
        self.test_results = {spec.name: {} for spec in self.bank.specs}
        measured = self._measured(logits, labels)
        for name, value in measured.items():
            head, metric = name.split("/")
            self.test_results[head][metric] = value
        self.log_dict({f"test/{name}": value for name, value in measured.items()})

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["constant_losses"] = self.constant_losses

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        super().on_load_checkpoint(checkpoint)
        self.constant_losses = checkpoint.get("constant_losses", {})

    def last_dev_loss(self, name: str) -> float:
        """Return a head's loss on dev prompts after the last epoch."""
        key = f"dev/{name}/loss"
        return [metrics[key] for _, metrics in self.history if key in metrics][-1]

    def _measured(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """Return metrics of all heads, for logits (heads, n) and labels (n,)."""
        measured = {}
        for spec, row in zip(self.bank.specs, logits, strict=True):
            for name, value in prediction_metrics(row, labels).items():
                measured[f"{spec.name}/{name}"] = value
        return measured

    def _collect(self, split: str, batch: HeadBatch, batch_index: int) -> None:
        """Keep a batch's logits (heads, n), labels (n,), and sums of losses and of weights
        (2, heads), until the epoch ends.
        """
        logits = self.bank(self.features(batch))
        if self.trainer.datamodule.has_rows(split, batch_index):
            sums = torch.stack(self.bank.losses(logits, batch.label))
            self._collected.append((logits.cpu(), batch.label.cpu(), sums.cpu()))

    def _gathered(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what was kept in all processes: logits (heads, n), labels (n,), and the sums of
        all batches (2, heads).
        """
        collected = self._collected
        if self.trainer.world_size > 1:
            parts: list = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, collected)
            collected = list(chain.from_iterable(parts))
        logits, labels, sums = zip(*collected, strict=True)
        self._collected.clear()
        return torch.cat(logits, dim=1), torch.cat(labels), torch.stack(sums).sum(dim=0)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        settings = self.optimizer
        weights = self.bank.parameters()
        optimizer = torch.optim.AdamW(weights, settings.lr, weight_decay=settings.weight_decay)
        return self.scheduled(optimizer, settings)

    @torch.no_grad()
    def check_not_constant(self, features: dict[str, Tensor]) -> None:
        """Raise UserError for a head whose predictions do not vary, or are NaN."""
        for name, head in self.bank.heads.items():
            if not head(features).std().item() >= LEAST_SPREAD:
                raise UserError(
                    f"head {name} predicts a constant, or NaN, after training; train longer"
                    " (trainer.max_epochs=), on more prompts (data.num_train=), or with another"
                    " optimizer.lr=."
                )
