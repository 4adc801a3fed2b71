"""Training a draft with Lightning, to propose what its target would say.

The target stays out of the module's parameters and checkpoints.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor

from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import Pair
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
from specheads.training.distill.draft_responses import DraftResponses, merged
from specheads.training.distill.placement import TargetPlace, is_sharded, shard, within_forward
from specheads.training.distill.samples import Sample, batch_of
from specheads.training.distill.settings import Distillation

Result = TypeVar("Result")


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

    # --- weights that are spread over processes

    def configure_model(self) -> None:
        """Spread the draft over the processes if the strategy is FSDP2; Lightning calls this before it makes the optimizer."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not is_sharded(self.draft):
            shard(self.draft, self.trainer.strategy.device_mesh["data_parallel"])

    def within_forward(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Call, as a forward pass of the draft: it gathers the weights that are spread over processes."""
        return within_forward(self.draft, call, *arguments) if is_sharded(self.draft) else call(*arguments)

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
        if "on_policy" in self.trainer.datamodule.splits["train"].shares:
            samples = self._answered(samples)
        losses, overlaps = self.within_forward(self.losses, samples, self.counts("train", batch_index))
        overlap = torch.stack([overlaps.sum(), overlaps.new_tensor(len(overlaps))])[:, None]
        return self.loss_of_batch(batch_index, losses.sum()[None], losses.new_tensor([len(losses)]), overlap)

    def _answered(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return samples with responses; the draft writes its own for some steps in advance."""
        data, first = self.trainer.datamodule, samples[0].key
        unanswered = data.splits["train"].unanswered

        def upcoming() -> tuple[list[Sample], list[Sample]]:
            keys = data.upcoming(first, self.settings.refresh_every * self.trainer.accumulate_grad_batches)
            return unanswered(keys), unanswered(data.part_of(keys))

        self.draft_responses.refresh(unanswered(data.upcoming(first, 1)), upcoming)
        return self.draft_responses.answered(samples)

    @torch.no_grad()
    def scale_gradients(self, factors: Tensor) -> None:
        factor = factors.item()
        for weight in self.draft.parameters():
            if weight.grad is not None:
                weight.grad.mul_(factor)

    def named_values(self, values: Sequence[float]) -> dict[str, float]:
        return dict(zip(("loss", "overlap"), values, strict=True))

    def losses(self, samples: Sequence[Sample], count: bool = True) -> tuple[Tensor, Tensor]:
        """Return the losses of the tokens to learn from, and the overlaps (N,) at all response tokens.

        `count`: whether the samples count in the choice of tokens; see EpochSampler.
        """
        stored = [sample for sample in samples if sample.stored is not None]
        computed = [sample for sample in samples if sample.stored is None]
        parts = [self._losses(some) for some in (stored, computed) if some]
        parts_of_losses, parts_of_overlaps, references = zip(*parts, strict=True)
        losses = torch.cat(parts_of_losses)
        if self._models[1]:
            gains = losses.detach() - torch.cat(references)
            everywhere, first = self._gathered_rows(gains if count else gains[:0])
            chosen = most_to_gain(everywhere, self.settings.loss.token_share)
            losses = losses[chosen[first : first + len(losses)]] if count else losses
        return losses, torch.cat(parts_of_overlaps)

    def _gathered_rows(self, values: Tensor) -> tuple[Tensor, int]:
        """Return the values (n,) of all processes one after another, and the place of the first one of this process."""
        if not torch.distributed.is_initialized():
            return values, 0
        sizes = self.all_gather(torch.tensor(len(values), device=self.device)).tolist()
        padded = self.all_gather(torch.nn.functional.pad(values, (0, max(sizes) - len(values))))
        return torch.cat([row[:size] for row, size in zip(padded, sizes, strict=True)]), sum(sizes[: self.trainer.global_rank])

    def _losses(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return losses, overlaps and a reference's losses (N,); either all samples have stored distributions, or none."""
        (pair, reference), loss = self._models, self.settings.loss
        batch = batch_of(samples, self.device)
        distributions, tokens = self._distributions(samples, batch), batch.response_tokens
        states = batch.states(pair.draft_lm, together=is_sharded(pair.draft))
        losses, overlaps = token_losses(pair.draft_lm, states, distributions, tokens, loss)
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
        weights = [weight for weight in self.draft.parameters() if weight.requires_grad]
        return self.adamw(weights, self.settings.optimizer.for_width(self.pair.draft_lm.hidden_size))

    # --- validation

    def on_validation_start(self) -> None:
        self.target_place.come_back()

    def on_validation_end(self) -> None:
        self.target_place.leave()

    def validation_step(self, samples: Sequence[Sample], batch_index: int) -> None:
        with torch.autocast(self.device.type, enabled=False):  # as before training and after it
            sums = self.within_forward(quality_sums, self.pair, samples, self.settings.warp, self.device)
        self._quality_sums.append(sums * self.counts("dev", batch_index))

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
        checkpoint["draft_responses"] = merged(states)

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        super().on_load_checkpoint(checkpoint)
        self.draft_responses.load(checkpoint["draft_responses"])


def shards_weights(strategy: Strategy) -> bool:
    """Whether no process has the whole draft."""
    return isinstance(strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy)
