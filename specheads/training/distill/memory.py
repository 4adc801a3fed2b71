"""Whether training a draft fits a GPU, and whether its layers run again for the gradient because it would not otherwise.

A step takes 16 bytes per weight: the weight, its gradient and AdamW's two moments in float32 (Rajbhandari et al. 2020). What a
layer keeps of a token for the gradient was counted on Llama, whose layers have a gated network, and rounded up; others take less.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from specheads.errors import UserError
from specheads.pair.config import PairConfig, checked_device
from specheads.pair.language_model import LanguageModel, weightless_model
from specheads.pair.padding import BATCH_TOKENS, SLICE_ELEMENTS
from specheads.pair.pair import Pair
from specheads.pair.quantization import QUANTIZATIONS, stored_bytes
from specheads.training.distill.settings import Distillation
from specheads.training.settings import num_processes

GIB = 2**30
USABLE = 0.9  # of the free memory; the rest is lost to fragments and the libraries' workspaces
STATE = 16
LOSS_COPIES = 20  # of a slice of logits in float32, rounded up from what docs/measurements/archive.md shows
SHARDED = ("fsdp", "deepspeed", "model_parallel")  # how the strategies begin that spread a draft over devices


@dataclass(frozen=True)
class _Needs:
    """Bytes that training takes on the draft's device; where layers run again, `inputs` are kept in place of `activations`."""

    state: int
    activations: int
    inputs: int
    target: int

    def total(self, runs_again: bool) -> int:
        """Return the most that a step takes; `runs_again`: layers run again for the gradient."""
        return self.state + self.target + (self.inputs if runs_again else self.activations)


def runs_again(needs: _Needs, usable: float, asked: bool | Literal["auto"] = "auto") -> bool:
    """Return whether layers run again for the gradient, so that training fits `usable` bytes; `asked`: what the settings say.

    Raises:
        UserError: it does not fit; the message has the arithmetic.
    """
    for choice in (False, True) if asked == "auto" else (asked,):
        if needs.total(choice) <= usable:
            return choice
    kept = needs.inputs if choice else needs.activations
    raise UserError(
        f"training the draft does not fit the GPU: at least {needs.total(choice) / GIB:.1f} GiB, of which "
        f"{needs.state / GIB:.1f} for its weights with gradients and AdamW's state, {kept / GIB:.1f} for what the gradient reads "
        f"and {needs.target / GIB:.1f} for the target, but {usable / GIB:.1f} GiB can be used, {USABLE:.0%} of what is free. "
        "Train a smaller draft (init_layers=, or another model.draft=), use a smaller loader.batch_size= with "
        "trainer.accumulate_grad_batches=, shorter texts (data.max_prompt_tokens=, data.max_new_tokens=), or spread the draft "
        "with trainer.devices= and +trainer.strategy=fsdp2."
    )


def needs_of(
    draft: PreTrainedModel, target: PreTrainedModel, settings: Distillation, longest: int, device: torch.device
) -> _Needs:
    """Return what training takes with models that need not have weights, and texts of up to `longest` tokens.

    The target's part on other devices than `device` is left out.
    """
    config, num_weights = draft.config.get_text_config(), sum(weight.numel() for weight in draft.parameters())
    half = chosen_precision(settings.trainer.precision, draft.dtype, device.type) != "32-true"
    num_tokens = max(1, settings.loader.batch_size // num_processes(settings.trainer, device.type)) * longest
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    kept = 35 * hidden + 8 * inner if half else 41 * hidden + 16 * inner  # of a token by a layer
    again = 2 * min(num_tokens, max(longest, BATCH_TOKENS)) * kept  # by the layer that runs again, with the gradients of that
    loss = 4 * LOSS_COPIES * min(SLICE_ELEMENTS, num_tokens * config.vocab_size)
    return _Needs(
        state=(STATE + (2 if half else 0)) * num_weights + loss,
        activations=num_tokens * config.num_hidden_layers * kept,
        inputs=num_tokens * config.num_hidden_layers * 4 * hidden + again,
        target=sum(stored_bytes(weight) for weight in target.parameters() if weight.device == device or weight.is_meta),
    )


def usable_memory(device: torch.device, settings: Distillation) -> float | None:
    """Return how many bytes of a GPU this process can use, with those that it uses already.

    None where nothing is planned: on a CPU, and for a draft that is spread over devices.
    """
    if device.type != "cuda" or str((settings.trainer.model_extra or {}).get("strategy")).startswith(SHARDED):
        return None
    return USABLE * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))


def chosen_precision(precision: str, dtype: torch.dtype, device_type: str) -> str:
    """Return the precision of training a draft that is stored in `dtype`.

    auto: bf16-mixed on a GPU by CUDA, whose units for bfloat16 are the fastest and whose flash attention takes nothing wider;
    elsewhere only for a draft in bfloat16; never for one in float64, which is for tests.
    """
    if precision != "auto":
        return precision
    half = dtype == torch.bfloat16 or (device_type == "cuda" and dtype != torch.float64)
    return "bf16-mixed" if half else "32-true"


def layers_run_again(pair: Pair, settings: Distillation, longest: int) -> bool:
    """Return whether layers of a loaded pair's draft run again for the gradient. Raises UserError: see `runs_again`."""
    device, asked = pair.draft_lm.device, settings.gradient_checkpointing
    usable = usable_memory(device, settings)
    if usable is None:
        return asked is True
    return runs_again(needs_of(pair.draft, pair.target, settings, longest, device), usable, asked)


def check_trainable(quantized: bool, draft_id: str) -> None:
    """Raise UserError for a draft whose weights are quantized."""
    if quantized:
        raise UserError(
            f"the draft {draft_id} is quantized, and its weights cannot be trained; leave out model.draft_quantization, and "
            "quantize the draft that training makes."
        )


def check_config(config: PairConfig, settings: Distillation, longest: int) -> None:
    """Raise UserError if training cannot fit, from the configs of models alone; nothing is allocated."""
    check_trainable(config.draft_quantization is not None, str(config.draft))
    device = torch.device(checked_device(config.device))
    usable = usable_memory(device, settings)
    if usable is None:
        return
    target = weightless_model(config.source("target"))
    initial = settings.initial_draft
    if initial is None:
        draft = weightless_model(config.source("draft"))
    else:
        with torch.device("meta"):
            draft = initial.make(target)
    longest = min(longest, LanguageModel(draft).window, LanguageModel(target).window)
    needs = needs_of(draft, target, settings, longest, device)
    if config.device_map:  # how much of it comes to this device is known once it is loaded
        needs = replace(needs, target=0)
    if config.quantization:
        needs = replace(needs, target=int(QUANTIZATIONS[config.quantization].num_bytes / target.dtype.itemsize * needs.target))
    runs_again(needs, usable, settings.gradient_checkpointing)
