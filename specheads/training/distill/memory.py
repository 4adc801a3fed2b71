"""The memory of a distillation by arithmetic, and what is given up where a device has too little of it.

All numbers are bytes on the draft's device. What a step keeps for its gradient was counted on Llama, whose layers have a gated
network; smaller layers take less. Sources: Korthikanti et al. 2022 (activations), Rajbhandari et al. 2020 (16 bytes per weight).
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from transformers import PreTrainedModel

from specheads.errors import UserError
from specheads.pair.config import PairConfig, checked_device
from specheads.pair.language_model import LanguageModel, weightless_model
from specheads.pair.padding import BATCH_TOKENS, SLICE_ELEMENTS
from specheads.pair.pair import Pair
from specheads.pair.quantization import QUANTIZATIONS, is_quantized, stored_bytes
from specheads.training.distill.settings import Distillation
from specheads.training.settings import num_processes

GIB = 2**30
USABLE = 0.9  # of the free memory; the rest is lost to fragments and the libraries' workspaces
STATE = 16  # bytes per weight in training: weight, gradient and AdamW's two moments in float32
LOSS_COPIES = 20  # of a slice of logits in float32, rounded up from what docs/measurements/archive.md shows


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model: how many weights it has, and how wide its layers are.

    `query_size` and `key_value_size` are the numbers of one token's queries, and of its keys.
    """

    num_weights: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    query_size: int
    key_value_size: int
    vocab_size: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Return the sizes of a model, which need not have weights."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        intermediate = next(
            (size for name in ("intermediate_size", "ffn_dim") if (size := getattr(config, name, None))), 4 * config.hidden_size
        )
        return cls(
            num_weights=sum(weight.numel() for weight in model.parameters()),
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=intermediate,
            num_heads=heads,
            query_size=heads * head_dim,
            key_value_size=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
            vocab_size=config.vocab_size,
        )

    @property
    def has_grouped_queries(self) -> bool:
        """Whether several query heads share the keys of one head."""
        return self.key_value_size < self.query_size

    def layer_bytes(self, half: bool) -> int:
        """Return what one layer keeps of a token for the gradient; with `half` its products are in bfloat16.

        Inputs of norms and of the five places that read normed states, queries, keys, values, the attention's output, and four
        tensors of the gated network; the sums between layers and the norms stay in float32.
        """
        attention = 2 * (self.query_size + self.key_value_size)
        small = 4 * self.num_heads + 8  # the attention's normalizers and those of the norms
        if half:
            return 26 * self.hidden_size + 2 * attention + 8 * self.intermediate_size + small
        return 24 * self.hidden_size + 4 * attention + 16 * self.intermediate_size + small

    def scores_bytes(self, num_tokens: int) -> int:
        """Return what one layer keeps of a token if it keeps attention scores, in two float32 copies of `num_tokens` each."""
        return 2 * 4 * self.num_heads * num_tokens

    def reading_bytes(self, bytes_per_weight: int) -> int:
        """Return what a model takes to read a batch of texts without a gradient."""
        return BATCH_TOKENS * (3 * self.intermediate_size + 8 * self.hidden_size) * bytes_per_weight


@dataclass(frozen=True)
class Batch:
    """The texts of a batch, and the tokens of the longest, to which all are padded."""

    num_texts: int
    num_tokens: int


@dataclass(frozen=True)
class Memory:
    """What a step of training takes, by purpose. `copies` are the weights in bfloat16 that mixed precision makes."""

    state: int = 0
    copies: int = 0
    activations: int = 0
    loss: int = 0
    reference: int = 0
    target: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Plan:
    """How a draft is trained: whether its layers run again for the gradient, and whether the target leaves the device."""

    gradient_checkpointing: bool = False
    target_leaves: bool = False


@dataclass(frozen=True)
class Forecast:
    """What decides the memory of a distillation.

    Args:
        draft: its sizes.
        batch: the largest batch.
        precision: Lightning's name, "32-true" or "bf16-mixed".
        device_type: "cuda", "cpu", ...
        target: bytes of the target on the draft's device, with those that it needs to read texts.
        reference: bytes of the draft that chooses tokens.
    """

    draft: ModelSizes
    batch: Batch
    precision: str
    device_type: str
    target: int = 0
    reference: int = 0

    @property
    def keeps_scores(self) -> bool:
        """Whether attention keeps all scores.

        On CUDA the flash kernels take half precision alone, and the memory-efficient one no grouped queries; what remains is the
        plain formula.
        """
        return self.device_type == "cuda" and self.precision == "32-true" and self.draft.has_grouped_queries

    def training(self, plan: Plan) -> Memory:
        """Return what a step takes."""
        draft, num_tokens = self.draft, self.batch.num_texts * self.batch.num_tokens
        half = self.precision != "32-true"
        layer = draft.layer_bytes(half) + (draft.scores_bytes(self.batch.num_tokens) if self.keeps_scores else 0)
        activations = num_tokens * draft.num_layers * layer
        if plan.gradient_checkpointing:
            # All layers keep their inputs. The one that runs again, for the texts that are read together, holds what it keeps
            # and the gradients of that.
            together = min(num_tokens, max(self.batch.num_tokens, BATCH_TOKENS))
            activations = num_tokens * draft.num_layers * 4 * draft.hidden_size + 2 * together * layer
        return Memory(
            state=STATE * draft.num_weights,
            copies=2 * draft.num_weights if half else 0,
            activations=activations,
            loss=4 * LOSS_COPIES * min(SLICE_ELEMENTS, num_tokens * draft.vocab_size),
            reference=self.reference,
            target=0 if plan.target_leaves else self.target,
        )

    def validation(self) -> Memory:
        """Return what measuring the draft takes, for which the target comes back."""
        trained = self.training(Plan())
        return replace(trained, copies=0, activations=0, target=self.target)


def planned(forecast: Forecast, usable: float, can_leave: bool, gradient_checkpointing: bool | None = None) -> Plan:
    """Return the first plan that fits `usable` bytes: the target leaves before layers run again, which takes a third more time.

    Args:
        can_leave: whether the target may leave, as its distributions can be stored.
        gradient_checkpointing: what was asked for; None: what fits.

    Raises:
        UserError: nothing fits; the message has the arithmetic.
    """
    flags = (False, True) if gradient_checkpointing is None else (gradient_checkpointing,)
    plans = [Plan(flag, leaves) for flag in flags for leaves in ((False, True) if can_leave else (False,))]
    needs = [max(forecast.training(plan), forecast.validation(), key=lambda memory: memory.total) for plan in plans]
    for plan, need in zip(plans, needs, strict=True):
        if need.total <= usable:
            return plan
    smallest, plan = min(zip(needs, plans, strict=True), key=lambda pair: pair[0].total)
    raise UserError(
        f"training the draft does not fit the GPU: {arithmetic(forecast, smallest, plan)}, but {usable / GIB:.1f} GiB can be "
        f"used, {USABLE:.0%} of what is free. Train a smaller draft (init=layers, init=fresh, or another model.draft=), use a "
        "smaller loader.batch_size= with trainer.accumulate_grad_batches=, shorter texts (data.max_prompt_tokens=, "
        "data.max_new_tokens=), or spread the draft with trainer.devices= and +trainer.strategy=fsdp2."
    )


def arithmetic(forecast: Forecast, memory: Memory, plan: Plan) -> str:
    """Return the parts of a sum as a sentence."""
    batch, weights = forecast.batch, forecast.draft.num_weights
    size = f"{weights / 1e9:.2f} billion weights" if weights >= 1e8 else f"{weights / 1e6:.1f} M weights"
    again = " with gradient checkpointing" if plan.gradient_checkpointing else ""
    names = {
        "state": f"{size} with gradients and AdamW's state, {STATE} bytes each",
        "copies": "their copies in half precision",
        "activations": f"activations of {batch.num_texts} texts of {batch.num_tokens:,} tokens in {forecast.precision}{again}",
        "loss": "the loss",
        "reference": "the reference",
        "target": "the target",
    }
    parts = [f"{getattr(memory, name) / GIB:.1f} GiB for {text}" for name, text in names.items() if getattr(memory, name)]
    return f"{' + '.join(parts)} = {memory.total / GIB:.1f} GiB"


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
    target = weightless_model(config.source("target"))
    initial = settings.initial_draft
    if initial is None:
        draft = weightless_model(config.source("draft"))
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
