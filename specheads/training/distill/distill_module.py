"""Training a draft with Lightning, to propose what its target would say.

The target stays out of the module's parameters and checkpoints.
"""

from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor

from specheads.pair import LanguageModel, Pair
from specheads.sampling import Warp
from specheads.training.curve_module import CurveModule
from specheads.training.distill.distill_loss import LossSettings, laws_of, most_to_gain, stored_probs, token_losses
from specheads.training.distill.measures import LiveSettings, live_measures, named_measures, sums_of
from specheads.training.distill.on_policy import DraftResponses
from specheads.training.distill.sample_batch import Texts
from specheads.training.distill.samples import Sample
from specheads.training.optimizer import Optimizer, cosine_after_warmup


class DistillModule(CurveModule):
    """A draft, its loss against the target's laws, and what tells how good a draft it is."""

    def __init__(
        self,
        pair: Pair,
        loss: LossSettings,
        optimizer: Optimizer,
        warp: Warp,
        own: DraftResponses,
        refresh_every: int = 16,
        reference: LanguageModel | None = None,
        live: LiveSettings | None = None,
    ) -> None:
        """`warp` is decoding's, which the measures are taken under; `own` writes on-policy samples; `reference` chooses tokens (AdaSPEC)."""
        super().__init__()
        self.draft = pair.draft
        self.loss, self.optimizer, self.warp = loss, optimizer, warp
        self.own, self.refresh_every = own, refresh_every
        self.live = live or LiveSettings()
        self._models = (pair, reference)  # in a tuple, so that their weights are not taken for ours
        self._measured: list[Tensor] = []
        self.before: dict[str, float] = {}  # measures on dev prompts before the first step

    @property
    def pair(self) -> Pair:
        return self._models[0]

    # --- training

    def on_train_start(self) -> None:
        """Begin the curves, or write those of a run that is gone on with."""
        if reference := self._models[1]:
            reference.model.to(self.device)
        self.log_history()
        if not self.history:
            self.record({f"dev/{name}": value for name, value in self.before.items()}, beforehand=True)

    def training_step(self, samples: Sequence[Sample], batch_index: int) -> Tensor:
        data = self.trainer.datamodule
        if any(sample.response is None for sample in samples):
            count = self.refresh_every * self.trainer.accumulate_grad_batches * data.batch_size
            first = samples[0].key
            samples = self.own.answered(samples, lambda: data.splits["train"].unanswered(data.upcoming(first, count)))
        values, shares = self.losses(samples)
        overlap = torch.stack([shares.sum(), shares.new_tensor(len(shares))])[:, None]
        return self.loss_of_batch(batch_index, values.sum()[None], values.new_tensor([len(values)]), overlap)

    @torch.no_grad()
    def scale_gradients(self, factors: Tensor) -> None:
        factor = factors.item()
        for weight in self.draft.parameters():
            if weight.grad is not None:
                weight.grad.mul_(factor)

    def named_values(self, values: Sequence[float]) -> dict[str, float]:
        return dict(zip(("loss", "overlap"), values, strict=True))

    def losses(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return the losses (N,) of the learnt tokens, of those that are chosen, and the overlaps at all learnt places."""
        pair, reference = self._models
        values, shares, references = [], [], []
        for stored in (True, False):
            some = [sample for sample in samples if (sample.distribution is not None) == stored]
            if not some:
                continue
            texts = Texts.of(some, self.device)
            if stored:
                ids, log_probs = (torch.cat([sample.distribution[name] for sample in some]) for name in ("ids", "log_probs"))
                distributions = stored_probs(ids.to(self.device), log_probs.to(self.device))
            else:
                with torch.no_grad():
                    distributions = laws_of(pair.target_lm, texts.states(pair.target_lm), self.loss)
            own = token_losses(pair.draft_lm, texts.states(pair.draft_lm), distributions, texts.learnt, self.loss)
            values.append(own[0])
            shares.append(own[1])
            if reference:
                with torch.no_grad():
                    references.append(token_losses(reference, texts.states(reference), distributions, texts.learnt, self.loss)[0])
        values, shares = torch.cat(values), torch.cat(shares)
        if references:
            values = values[most_to_gain(values.detach(), torch.cat(references), self.loss.token_share)]
        return values, shares

    def configure_optimizers(self) -> dict:
        settings = self.optimizer
        weights = [weight for weight in self.draft.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=settings.lr, weight_decay=settings.weight_decay)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_after_warmup(steps, settings.warmup_share))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # --- measures

    def validation_step(self, samples: Sequence[Sample], batch_index: int) -> None:
        with torch.autocast(self.device.type, enabled=False):  # as before training and after it
            self._measured.append(sums_of(self.pair, samples, self.warp, self.device))

    def on_validation_epoch_end(self) -> None:
        metrics = self._gathered()
        if not shards_weights(self.trainer.strategy):  # every process decodes the same: they would wait for one in any case
            metrics |= live_measures(self.pair, self.trainer.datamodule.splits["dev"], self.warp, self.live)
        self.record({f"dev/{name}": value for name, value in metrics.items()})
        self.log("dev overlap", metrics["overlap"], prog_bar=True, logger=False)

    def _gathered(self) -> dict[str, float]:
        """Return the measures over what all processes have seen."""
        sums = torch.stack(self._measured).sum(0)
        self._measured = []
        return named_measures(self.all_gather(sums).reshape(-1, len(sums)).sum(0))

    # --- checkpoints

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        super().on_save_checkpoint(checkpoint)
        states: list = [self.own.state()]
        if self.trainer.world_size > 1:
            states *= self.trainer.world_size
            torch.distributed.all_gather_object(states, self.own.state())
        checkpoint["own_responses"] = states

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        super().on_load_checkpoint(checkpoint)
        self.own.load(checkpoint["own_responses"][self.trainer.global_rank])


def shards_weights(strategy: Strategy) -> bool:
    """Whether no process has the whole draft."""
    return isinstance(strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy)
