"""Training a draft with Lightning, to propose what its target would say.

The target is in no checkpoint, nor what a draft borrows of it.

The weights of a draft may be spread over processes. FSDP2 (torch's fully_shard) gathers them while
the forward pass of a class runs; `within_forward` makes one of a function.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from specheads.decoding.engine import bulk_operations
from specheads.pair.draft_vocabulary import borrowed_weight
from specheads.pair.feature_draft import FeatureDraft
from specheads.pair.padding import SLICE_ELEMENTS, slices
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts, states_of
from specheads.pair.sampling import check_numbers, computing_with, naming_rows
from specheads.training.curve_module import CurveModule
from specheads.training.distill.distill_loss import (
    DistributionSource,
    computed_distributions,
    stored_distributions,
    token_losses,
)
from specheads.training.distill.draft_quality import (
    draft_states,
    quality_of,
    quality_sums,
    states_by_depth,
)
from specheads.training.distill.muon import MuonAndAdamW, matrices_of_layers
from specheads.training.distill.samples import Sample, place_of, stored_totals, texts_of
from specheads.training.distill.settings import Distillation
from specheads.training.settings import Optimizer

Result = TypeVar("Result")
DRAFT = "draft"  # the name of the one model that is trained


class DistillModule(CurveModule):
    """A draft, its loss against the target's distributions, and the figures that say how good it
    is.
    """

    def __init__(self, pair: Pair, settings: Distillation) -> None:
        super().__init__()
        self.draft = pair.draft
        draft = pair.draft_lm
        self.settings = settings.for_draft(draft.hidden_size, bool(draft.reads_layers))
        self.pair = pair  # no module, so Lightning does not count its weights as this one's
        self._borrowed = borrowed_weight(pair.draft)
        self.strict_loading = self._borrowed is None
        self._quality_sums: list[Tensor] = []
        self.before: dict[str, float] = {}  # quality on dev prompts before the first step

    def configure_model(self) -> None:
        """Spread the draft over the processes if the strategy is FSDP2.

        Lightning calls this before it makes the optimizer.
        """
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(
            self.draft, FSDPModule
        ):
            shard(self.draft, self.trainer.strategy.device_mesh["data_parallel"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["state_dict"].pop(f"{DRAFT}.{self._borrowed}", None)

    def on_train_start(self) -> None:
        self.log_history()
        if not self.history:
            self.record(
                {f"dev/{name}": value for name, value in self.before.items()}, beforehand=True
            )

    def training_step(self, samples: Sequence[Sample], batch_index: int) -> Tensor:
        with computing_with(bulk_operations(self.device)):
            losses, overlaps, weights = within_forward(self.draft, self.losses, samples)
        if losses.isnan().any():  # of the target, or of the draft, whose weights are then checked
            naming_rows(self._check_target, samples, place_of)
        counted = weights > 0
        overlap = torch.stack([overlaps[counted].sum(), counted.sum().to(overlaps)])[:, None]
        return self.loss_of_batch(
            batch_index, (losses * weights).sum()[None], weights.sum()[None], overlap
        )

    @torch.no_grad()
    def scale_gradients(self, factors: Tensor) -> None:
        factor = factors.item()
        for weight in self.draft.parameters():
            if weight.grad is not None:
                weight.grad.mul_(factor)

    def named_values(self, values: Sequence[float]) -> dict[str, float]:
        return dict(zip(("loss", "overlap"), values, strict=True))

    def losses(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses, overlaps and weights of the losses, (N,) each, of all response tokens of
        samples that all have stored distributions, or none; (N, J) of a draft that reads its target
        after 1 to J steps.
        """
        texts = texts_of(samples)
        draft = self.pair.draft_lm
        divergence = self.settings.divergence
        if isinstance(self.draft, FeatureDraft):
            states = states_by_depth(self.pair, texts, self.settings.num_steps)
            totals = stored_totals(samples)
            known = computed_distributions(
                self.pair.target_lm,
                states.target,
                totals if totals is None else totals.to(self.device),
            )
            losses, overlaps = token_losses(draft, states.draft, known, divergence)
            depths = torch.arange(self.settings.num_steps).to(losses)
            return losses, overlaps, states.exists * self.settings.step_decay**depths
        known = self._distributions(samples, texts)
        losses, overlaps = token_losses(draft, draft_states(draft, texts), known, divergence)
        return losses, overlaps, torch.ones_like(overlaps)

    @torch.no_grad()
    def _check_target(self, samples: Sequence[Sample]) -> None:
        """Raise NotFinite where the target's logits along samples are NaN or infinite."""
        target = self.pair.target_lm
        hidden = states_of(target, texts_of(samples))
        for piece in slices(len(hidden), target.vocab_size, SLICE_ELEMENTS):
            check_numbers(self.pair.target_id, target.logits(hidden[piece]).log_softmax(dim=-1))

    @torch.no_grad()
    def _distributions(self, samples: Sequence[Sample], texts: GivenTexts) -> DistributionSource:
        ids = []
        log_probs = []
        for sample in samples:
            if sample.stored is not None:
                ids.append(sample.stored["ids"])
                log_probs.append(sample.stored["log_probs"].float())  # autocast joins no float16
        if ids:
            return stored_distributions(
                torch.cat(ids).to(self.device), torch.cat(log_probs).to(self.device)
            )
        target = self.pair.target_lm
        return computed_distributions(target, states_of(target, texts))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        settings = Optimizer(**self.settings.optimizer.values())
        # Frozen ones too: FSDP2 finds the state of a checkpoint by the order of all weights
        weights = list(self.draft.parameters())
        matrices = matrices_of_layers(self.draft)
        if isinstance(self.trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
            matrices = []  # these split weights without regard to matrices
        half = self.trainer.precision == "bf16-mixed"
        dtype = torch.bfloat16 if half else torch.float32
        optimizer = MuonAndAdamW(weights, matrices, settings.lr, settings.weight_decay, dtype)
        return self.scheduled(optimizer, settings)

    def validation_step(self, samples: Sequence[Sample], batch_index: int) -> None:
        # In the precision in which the draft is measured before training and after it.
        with torch.autocast(self.device.type, enabled=False):
            warp = self.settings.warp
            sums = within_forward(self.draft, quality_sums, self.pair, samples, warp, self.device)
        self._quality_sums.append(sums * self.trainer.datamodule.has_rows("dev", batch_index))

    def on_validation_epoch_end(self) -> None:
        sums = torch.stack(self._quality_sums).sum(0)
        self._quality_sums = []
        metrics = quality_of(self.all_gather(sums).reshape(-1, *sums.shape).sum(0))
        self.record({f"dev/{name}": value for name, value in metrics.items()})
        self.dev_values = {DRAFT: 1 - metrics["overlap"]}

    def trained_weights(self, names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        weights = {}
        for name, weight in self.trainer.strategy.lightning_module_state_dict().items():
            if name.startswith(f"{DRAFT}.") and name != f"{DRAFT}.{self._borrowed}":
                weights[name.removeprefix(f"{DRAFT}.")] = weight
        return {name: weights for name in names}


def shards_weights(strategy: Strategy) -> bool:
    """Whether no process has the whole draft."""
    return isinstance(strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy)


def shard(draft: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Spread the weights of a draft over the processes of a mesh.

    Gradients are averaged over them.
    """
    layers = getattr(draft, "_no_split_modules", None) or ()
    for module in draft.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(draft, mesh=mesh)
    if torch.distributed.get_backend(mesh.get_group()) != "nccl":
        # Gloo has summed where the mean was asked for (pytorch #162338); asked for sums, FSDP2
        # divides them itself.
        for module in draft.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    draft.called = lambda call, *arguments: call(*arguments)
    register_fsdp_forward_method(draft, "called")


def within_forward(
    draft: PreTrainedModel, call: Callable[..., Result], *arguments: object
) -> Result:
    """Call, as the forward pass of a draft that is spread.

    Its layers run equally often in all processes.
    """
    return draft.called(call, *arguments) if hasattr(draft, "called") else call(*arguments)
