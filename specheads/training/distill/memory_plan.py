"""The memory that a distillation takes on this machine: checked from configs alone, and planned once the pair is loaded."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from specheads.errors import UserError
from specheads.language_model import LanguageModel, checked_device, checked_dtype, weightless_model
from specheads.pair import Pair
from specheads.pair_config import PairConfig
from specheads.quantization import QUANTIZATIONS, is_quantized, stored_bytes
from specheads.training.distill.memory import USABLE, Batch, Forecast, ModelSizes, Plan, planned
from specheads.training.distill.settings import Distillation
from specheads.training.process_checks import num_processes

SHARDED = ("fsdp", "deepspeed", "model_parallel")  # how the strategies begin that spread a draft over devices


def usable_memory(device: torch.device) -> float | None:
    """Return how many bytes of a GPU this process can use, with those that it uses already; None where nothing is planned."""
    if device.type != "cuda":
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


def is_sharded(settings: Distillation) -> bool:
    """Whether the draft is spread over devices, which this arithmetic is not for."""
    return str((settings.trainer.model_extra or {}).get("strategy")).startswith(SHARDED)


def may_leave(settings: Distillation) -> bool:
    """Whether the distributions that are learned can all be stored before training."""
    return settings.target_probs.keep != "recomputed" and "on_policy" not in settings.shares


def forecast_of(
    draft: PreTrainedModel, target: PreTrainedModel, settings: Distillation, longest: int, device: torch.device
) -> Forecast:
    """Return the forecast for models, which need not have weights; the target's part on other devices than `device` is left out.

    `longest` is the number of tokens of the longest text.
    """
    sizes, size = ModelSizes.of(draft), draft.dtype.itemsize
    here = sum(stored_bytes(weight) for weight in target.parameters() if weight.device == device or weight.is_meta)
    return Forecast(
        draft=sizes,
        batch=Batch(max(1, settings.loader.batch_size // num_processes(settings.trainer, device.type)), longest),
        precision=chosen_precision(settings.trainer.precision, draft.dtype, device.type),
        device_type=device.type,
        target=here + ModelSizes.of(target).reading_bytes(target.dtype.itemsize) if here else 0,
        reference=sizes.num_weights * size if settings.reference else 0,
    )


def plan_of(pair: Pair, settings: Distillation, longest: int, can_store: bool) -> Plan:
    """Return how the draft of a loaded pair is trained; `can_store`: the target's distributions fit where they are stored.

    Raises:
        UserError: training does not fit the GPU.
    """
    asked, device = settings.gradient_checkpointing, pair.draft_lm.device
    usable = None if is_sharded(settings) else usable_memory(device)
    if usable is None:
        return Plan(gradient_checkpointing=asked is True)
    can_leave = can_store and may_leave(settings) and is_movable(pair.target)
    forecast = forecast_of(pair.draft, pair.target, settings, longest, device)
    return planned(forecast, usable, can_leave, None if asked == "auto" else asked)


def is_movable(target: PreTrainedModel) -> bool:
    """Whether a target is on one device and can go to another."""
    return not getattr(target, "hf_device_map", None) and not is_quantized(target)


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
    usable = None if is_sharded(settings) else usable_memory(device)
    if usable is None:
        return
    target = _without_weights("target", config, config.device_map)
    initial = settings.initial_draft
    if initial is None:
        draft = _without_weights("draft", config, None)
    else:
        with torch.device("meta"):
            draft = initial.make(target)
    longest = min(longest, LanguageModel(draft).window, LanguageModel(target).window)
    forecast = forecast_of(draft, target, settings, longest, device)
    if config.device_map:  # how much of it comes to this device is known once it is loaded
        forecast = replace(forecast, target=0)
    if config.quantization:
        share = QUANTIZATIONS[config.quantization].num_bytes / target.dtype.itemsize
        forecast = replace(forecast, target=int(share * forecast.target))
    asked = settings.gradient_checkpointing
    planned(forecast, usable, may_leave(settings), None if asked == "auto" else asked)


def _without_weights(role: str, config: PairConfig, device_map: str | None) -> PreTrainedModel:
    """Return the draft or the target of a config on the device "meta"."""
    is_draft = role == "draft"
    location, revision = (config.draft, config.draft_revision) if is_draft else (config.target, config.target_revision)
    dtype, device = checked_dtype(config.dtype), checked_device(config.device)
    return weightless_model(location, revision, dtype, device, device_map, config.trusts(role))
