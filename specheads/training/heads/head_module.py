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
from specheads.heads.features import RECORDED
from specheads.heads.head import LEAST_SPREAD
from specheads.heads.metrics import auroc, binary_kl, fit_logistic, prediction_metrics
from specheads.heads.portable.network import assemble
from specheads.pair.pair import Pair
from specheads.training.curve_module import CurveModule
from specheads.training.heads.bank import HeadBank, constant_loss
from specheads.training.settings import Optimizer

TRAIN_BATCHES = 64  # results on training prompts are computed on so many
RIVAL_BATCHES = 16  # and the logistic of rules without a head, four numbers, is fitted to so many


class HeadModule(CurveModule):
    """A bank of heads, their weighted loss, and the metrics of their predictions."""

    def __init__(self, bank: HeadBank, pair: Pair, optimizer: Optimizer) -> None:
        super().__init__()
        self.bank = bank
        self.optimizer = optimizer
        self.pair = pair  # no module, so that its weights are not registered as this one's
        self._collected: list[tuple[Tensor, Tensor, Tensor]] = []  # see `_collect`
        self.test_results: dict[str, dict[str, float]] = {}
        # Each head's KL on train and dev prompts (SpecDec++, table 3).
        self.divergences: dict[str, dict[str, float]] = {}
        self.best_steps: dict[str, int] = {}  # after which each head's weights are exported
        # On dev prompts, of the best prediction that is the same everywhere
        self.constant_losses: dict[str, float] = {}

    def features(
        self, batch: HeadBatch, needs: frozenset[str] | None = None, predicts: str | None = None
    ) -> dict[str, Tensor]:
        """Return the features of a batch: those that the bank reads, or those that `needs` and
        `predicts` ask for.
        """
        predicts = predicts or self.bank.predicts
        needs = needs or self.bank.needs
        features = {}
        if predicts == self.bank.predicts:
            features = {name: batch.features[name] for name in needs & batch.features.keys()}
        if missing := needs - features.keys():
            features |= head_features(self.pair, batch, predicts, missing)
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
        logits = self.bank(self.features(batch))
        if self.trainer.datamodule.has_rows("dev", batch_index):
            self._collect(batch, logits, torch.stack(self.bank.losses(logits, batch.label)))

    def on_validation_epoch_end(self) -> None:
        logits, labels, parts = self._gathered()
        losses, weights = torch.stack(parts).sum(dim=0)
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
        if self.trainer.datamodule.has_rows("test", batch_index):
            self._collect(batch, *self.logits_and_rivals(batch))

    def on_test_epoch_end(self) -> None:
        logits, labels, rivals = self._gathered()
        self.test_results = {spec.name: {} for spec in self.bank.specs}
        for name, value in self._measured(logits, labels).items():
            head, metric = name.split("/")
            self.test_results[head][metric] = value
        # On the prompts that the heads learned from.
        known = []
        inputs = []
        predicted = []
        batches = self.trainer.datamodule.batches("train", shared=False)
        for number, batch in enumerate(islice(batches, TRAIN_BATCHES)):
            batch = batch.to(self.device)
            if number < RIVAL_BATCHES:
                logits, of_rivals = self.logits_and_rivals(batch)
                inputs.append(of_rivals.cpu())
            else:
                logits = self.bank(self.features(batch))
            known.append(batch.label.cpu())
            predicted.append(logits.cpu())
        weights = fit_logistic(torch.cat(inputs), torch.cat(known[:RIVAL_BATCHES]))
        self.test_results |= _rivals(torch.cat(rivals), labels, weights)
        for spec, row in zip(self.bank.specs, torch.cat(predicted, dim=1), strict=True):
            self.divergences[spec.name] = {"train": binary_kl(row, torch.cat(known)).item()}
            if dev := self.dev_metrics(spec.name, self.best_steps.get(spec.name)):
                self.divergences[spec.name]["dev"] = dev["kl"]
        for name, metrics in self.test_results.items():
            self.log_dict({f"test/{name}/{metric}": value for metric, value in metrics.items()})

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["constant_losses"] = self.constant_losses

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        super().on_load_checkpoint(checkpoint)
        self.constant_losses = checkpoint.get("constant_losses", {})

    def dev_metrics(self, name: str, step: int | None = None) -> dict[str, float]:
        """Return a head's metrics on dev prompts after a step, None: the last validation's."""
        found: dict[str, float] = {}
        for measured_at, metrics in self.history:
            of_head = {}
            for key, value in metrics.items():
                if key.startswith(f"dev/{name}/"):
                    of_head[key.rpartition("/")[2]] = value
            if of_head and step in (None, measured_at):
                found = of_head
        return found

    def _measured(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """Return metrics of all heads, for logits (heads, n) and labels (n,)."""
        measured = {}
        for spec, row in zip(self.bank.specs, logits, strict=True):
            for name, value in prediction_metrics(row, labels).items():
                measured[f"{spec.name}/{name}"] = value
        return measured

    def logits_and_rivals(self, batch: HeadBatch) -> tuple[Tensor, Tensor]:
        """Return logits (heads, n) of drafted tokens, and (n, 3) the features of rules without a
        head: log d(y), max d and entropy.
        """
        recorded = frozenset(RECORDED)
        if self.bank.predicts == "next_token":  # both read at the same positions
            features = of_rivals = self.features(batch, self.bank.needs | recorded)
        else:
            features = self.features(batch)
            of_rivals = self.features(batch, recorded, "next_token")
        return self.bank(features), assemble(RECORDED, of_rivals, of_rivals["entropy"].dtype)

    def _collect(self, batch: HeadBatch, logits: Tensor, more: Tensor) -> None:
        """Keep logits (heads, n), the batch's labels (n,) and `more` until the epoch ends."""
        self._collected.append((logits.cpu(), batch.label.cpu(), more.cpu()))

    def _gathered(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        collected = self._collected
        if self.trainer.world_size > 1:
            parts: list = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, collected)
            collected = list(chain.from_iterable(parts))
        logits, labels, more = zip(*collected, strict=True)
        self._collected.clear()
        return torch.cat(logits, dim=1), torch.cat(labels), list(more)

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


def _rivals(features: Tensor, labels: Tensor, weights: Tensor) -> dict[str, dict[str, float]]:
    """Return metrics on the same tokens without a head: of the draft's numbers (n, 3), and of their
    logistic.
    """
    logistic = features.double() @ weights[:-1] + weights[-1]
    return {
        "draft probability": {"auroc": auroc(features[:, 0], labels)},
        "max probability": {"auroc": auroc(features[:, 1], labels)},
        "entropy": {"auroc": auroc(-features[:, 2], labels)},
        "logistic of the three": prediction_metrics(logistic.float(), labels),
    }
