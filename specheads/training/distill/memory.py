"""Whether a draft can be trained at all, and its weights fit a GPU next to the target, before
anything is loaded.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from specheads.errors import UserError
from specheads.pair.config import PairConfig
from specheads.pair.draft_vocabulary import borrows_embedding
from specheads.pair.language_model import weightless_model
from specheads.pair.source import ModelSource, checked_device
from specheads.training.distill.muon import matrices_of_layers
from specheads.training.distill.settings import Distillation

GIB = 2**30
# How the strategies begin that spread a draft over devices
SHARDED = "fsdp", "deepspeed", "model_parallel"


class TrainedWeights(NamedTuple):
    """How many weights a draft has in training, how many of them are borrowed, and how many move by
    Muon.
    """

    num: int
    num_borrowed: int
    num_by_muon: int

    @classmethod
    def of(cls, draft: PreTrainedModel, settings: Distillation) -> "TrainedWeights":
        """Return those of a draft whose output may still have all tokens."""
        table = draft.get_input_embeddings().weight
        output = draft.get_output_embeddings().weight
        num = sum(weight.numel() for weight in draft.parameters())
        borrows = borrows_embedding(draft)
        if settings.draft_vocabulary is not None:
            num_kept = min(settings.draft_vocabulary, len(output))
            num_before = 0 if output is table else len(output)
            num += (num_kept - num_before) * output.shape[1]
            borrows = borrows or settings.embedding == "target"
        num_by_muon = sum(weight.numel() for weight in matrices_of_layers(draft))
        return cls(num, table.numel() if borrows else 0, num_by_muon)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, gradients and the optimizer's state (Rajbhandari et al. 2020)."""
        # Muon has one moment in float32, AdamW two, and what is borrowed none
        return 16 * self.num - 4 * self.num_by_muon - 12 * self.num_borrowed

    def written_bytes(self, itemsize: float) -> float:
        """Bytes on disk: a checkpoint and the best weights in float32, and the draft's folder with
        weights of `itemsize` bytes.
        """
        return (16 + itemsize) * (self.num - self.num_borrowed) - 4 * self.num_by_muon


def check_trainable(quantized: bool, draft_id: str) -> None:
    """Raise UserError for a draft whose weights are quantized."""
    if quantized:
        raise UserError(
            f"the draft {draft_id} is quantized, and its weights cannot be trained; leave out"
            " model.draft_quantization, and quantize the draft that training makes."
        )


def check_config(config: PairConfig, settings: Distillation) -> None:
    """Raise UserError for a draft that cannot be trained, from the configs of models alone.

    Nothing is allocated.
    """
    check_trainable(config.draft_quantization is not None, str(config.draft))
    device = torch.device(checked_device(config.device))
    if device.type != "cuda" or str(settings.trainer.other("strategy")).startswith(SHARDED):
        return

    def source_of(role: str) -> ModelSource:
        # The device decides the type of the weights
        return replace(ModelSource.of(config, role), device=str(device))

    target = weightless_model(source_of("target"))
    initial = settings.initial_draft
    if initial is None:
        draft = weightless_model(source_of("draft"))
    else:
        with torch.device("meta"):
            draft = initial.make(target)
    target_bytes = 0.0
    if not config.device_map:  # else it is known once it is loaded how much comes to this device
        width = source_of("target").bytes_per_weight(target.dtype)
        target_bytes = width * target.num_parameters()
    # What its layers keep for the gradient comes on top; where that does not fit,
    # `errors.user_error` says what makes it smaller.
    state = TrainedWeights.of(draft, settings).num_bytes
    needed = state + target_bytes
    free = torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise UserError(
            f"training the draft does not fit the GPU: at least {needed / GIB:.1f} GiB, of which"
            f" {state / GIB:.1f} for its weights with gradients and the optimizer's state and"
            f" {target_bytes / GIB:.1f} for the target, but {free / GIB:.1f} GiB are free. Train a"
            " smaller draft (init_layers=, or another model.draft=), or spread it with"
            " trainer.devices= and +trainer.strategy=fsdp2."
        )
