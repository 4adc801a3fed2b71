"""Training a draft with Lightning, to propose what its target would say.

The target stays out of the module's parameters and checkpoints.
"""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor

from specheads.language_model import LanguageModel
from specheads.pair import Pair
from specheads.replay.response_batch import ResponseBatch
from specheads.training.curve_module import CurveModule
from specheads.training.distill.distill_loss import (
    DistributionSource,
    computed_distributions,
    most_to_gain,
    stored_distributions,
    token_losses,
)
from specheads.training.distill.draft_quality import live_quality, quality_of, quality_sums
from specheads.training.distill.draft_responses import DraftResponses
from specheads.training.distill.samples import Sample, batch_of
from specheads.training.distill.settings import Distillation
from specheads.training.distill.target_place import TargetPlace
from specheads.training.optimizer import cosine_after_warmup


class DistillModule(CurveModule):
    """A draft, its loss against the target's distributions, and the figures that say how good it is."""

    def __init__(
        self,
        pair: Pair,
        settings: Distillation,
        max_new_tokens: int,
        reference: LanguageModel | None = None,
        target_place: TargetPlace | None = None,
    ) -> None:
        """Train the pair's draft.

        Args:
            max_new_tokens: of the draft's own responses.
            reference: chooses the tokens that the draft learns from (AdaSPEC: Hu et al. 2025).
            target_place: where the target is while the draft trains; None: where it is now.
        """
        super().__init__()
        self.draft, self.settings = pair.draft, settings
        self.draft_responses = DraftResponses(pair, settings, max_new_tokens)
        self.target_place = target_place or TargetPlace(pair.target, leaves=False)
        self._models = (pair, reference)  # in a tuple, so that Lightning does not count their weights as the module's
        self._quality_sums: list[Tensor] = []
        self.before: dict[str, float] = {}  # quality on dev prompts before the first step

    @property
    def pair(self) -> Pair:
        """The pair whose draft is trained."""
        return self._models[0]

    # --- training

    def on_train_start(self) -> None:
        """Begin the curves, or write those of a resumed run."""
        if reference := self._models[1]:
            reference.model.to(self.device)
        self.target_place.leave()
        self.log_history()
        if not self.history:
            self.record({f"dev/{name}": value for name, value in self.before.items()}, beforehand=True)

    def training_step(self, samples: Sequence[Sample], batch_index: int) -> Tensor:
        data = self.trainer.datamodule
        if any(sample.response is None for sample in samples):
            count = self.settings.refresh_every * self.trainer.accumulate_grad_batches * data.batch_size
            first = samples[0].key
            samples = self.draft_responses.answered(samples, lambda: data.splits["train"].unanswered(data.upcoming(first, count)))
        losses, overlaps = self.losses(samples)
        overlap = torch.stack([overlaps.sum(), overlaps.new_tensor(len(overlaps))])[:, None]
        return self.loss_of_batch(batch_index, losses.sum()[None], losses.new_tensor([len(losses)]), overlap)

    @torch.no_grad()
    def scale_gradients(self, factors: Tensor) -> None:
        factor = factors.item()
        for weight in self.draft.parameters():
            if weight.grad is not None:
                weight.grad.mul_(factor)

    def named_values(self, values: Sequence[float]) -> dict[str, float]:
        return dict(zip(("loss", "overlap"), values, strict=True))

    def losses(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return the losses of the tokens to learn from, and the overlaps (N,) at all response tokens."""
        stored = [sample for sample in samples if sample.stored is not None]
        computed = [sample for sample in samples if sample.stored is None]
        parts = [self._losses(some) for some in (stored, computed) if some]
        parts_of_losses, parts_of_overlaps, references = zip(*parts, strict=True)
        losses = torch.cat(parts_of_losses)
        if self._models[1]:
            losses = losses[most_to_gain(losses.detach(), torch.cat(references), self.settings.loss.token_share)]
        return losses, torch.cat(parts_of_overlaps)

    def _losses(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return losses, overlaps and a reference's losses (N,); either all samples have stored distributions, or none."""
        (pair, reference), loss = self._models, self.settings.loss
        batch = batch_of(samples, self.device)
        distributions, tokens = self._distributions(samples, batch), batch.response_tokens
        losses, overlaps = token_losses(pair.draft_lm, batch.states(pair.draft_lm), distributions, tokens, loss)
        if reference is None:
            return losses, overlaps, None
        with torch.no_grad():
            return losses, overlaps, token_losses(reference, batch.states(reference), distributions, tokens, loss)[0]

    @torch.no_grad()
    def _distributions(self, samples: Sequence[Sample], batch: ResponseBatch) -> DistributionSource:
        """Return the target's distributions along samples, stored or computed here."""
        if stored := [sample.stored for sample in samples if sample.stored is not None]:
            ids, log_probs = (torch.cat([tensors[name] for tensors in stored]) for name in ("ids", "log_probs"))
            return stored_distributions(ids.to(self.device), log_probs.to(self.device))
        target = self.pair.target_lm
        return computed_distributions(target, batch.states(target), self.settings.loss)

    def configure_optimizers(self) -> dict[str, Any]:
        settings = self.settings.optimizer.for_width(self.pair.draft_lm.hidden_size)
        optimizer = settings.optimizer_of(self.draft)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_after_warmup(steps, settings.warmup_share))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # --- validation

    def on_validation_start(self) -> None:
        self.target_place.come_back()

    def on_validation_end(self) -> None:
        self.target_place.leave()

    def validation_step(self, samples: Sequence[Sample], batch_index: int) -> None:
        with torch.autocast(self.device.type, enabled=False):  # as before training and after it
            self._quality_sums.append(quality_sums(self.pair, samples, self.settings.warp, self.device))

    def on_validation_epoch_end(self) -> None:
        metrics = self._gathered_quality()
        # All processes decode the same prompts; otherwise they would wait for the first.
        if not shards_weights(self.trainer.strategy):
            dev = self.trainer.datamodule.splits["dev"]
            metrics |= live_quality(self.pair, dev, self.settings.warp, self.settings.validation)
        self.record({f"dev/{name}": value for name, value in metrics.items()})
        self.log("dev overlap", metrics["overlap"], prog_bar=True, logger=False)

    def _gathered_quality(self) -> dict[str, float]:
        """Return the draft's quality over the samples of all processes."""
        sums = torch.stack(self._quality_sums).sum(0)
        self._quality_sums = []
        return quality_of(self.all_gather(sums).reshape(-1, len(sums)).sum(0))

    # --- checkpoints

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        super().on_save_checkpoint(checkpoint)
        states: list = [self.draft_responses.state()]
        if self.trainer.world_size > 1:
            states *= self.trainer.world_size
            torch.distributed.all_gather_object(states, self.draft_responses.state())
        checkpoint["draft_responses"] = states

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        super().on_load_checkpoint(checkpoint)
        self.draft_responses.load(checkpoint["draft_responses"][self.trainer.global_rank])


def shards_weights(strategy: Strategy) -> bool:
    """Whether no process has the whole draft."""
    return isinstance(strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy)
