"""The memory of a distillation by arithmetic, and what is given up where a device has too little of it.

All numbers are bytes on the draft's device. What a step keeps for its gradient was counted on Llama, whose layers have a gated
network; smaller layers take less. Sources: Korthikanti et al. 2022 (activations), Rajbhandari et al. 2020 (16 bytes per weight).
"""

from dataclasses import dataclass, fields, replace
from typing import Self

from transformers import PreTrainedModel

from specheads.errors import UserError
from specheads.padding import BATCH_TOKENS, SLICE_ELEMENTS

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
