"""A causal language model as decoding and training use it, and how it is loaded.

The *tap* is the input of a model's output embedding, which `model.base_model` returns. Training and decoding both read it
through `LanguageModel`, so a head sees the same vector in both.
"""

import logging
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specheads.errors import UserError, is_out_of_memory
from specheads.pair.quantization import QUANTIZATIONS, quantize
from specheads.pair.revisions import DRAFT_TEMPERATURE, from_pretrained, resolve
from specheads.pair.sampling import at_least_float32
from specheads.pair.synthetic import is_synthetic, synthetic_model, synthetic_tokenizer

logger = logging.getLogger(__name__)

# What torch calls the instructions for products of bfloat16 numbers, of matrices (x86's AMX, ARM's BFMMLA) and of vectors.
MATRIX_INSTRUCTIONS = ("amx_bf16", "bf16", "sve_bf16")
VECTOR_INSTRUCTIONS = ("avx512_bf16",)


class LanguageModel:
    """A causal language model as two steps: tokens -> hidden states (the tap) -> logits over the shared vocabulary.

    A model may be spread over devices; inputs and outputs are on the device of its input embedding. `temperature` divides its
    logits wherever they are used, before any warp. Tokens that it does not know (`known`, (V,) bool; None: it knows all) have a
    logit of minus infinity.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int | None = None,
        temperature: float = 1.0,
        known: Tensor | None = None,
    ) -> None:
        avoid_cudnn_attention()
        self.model, self.temperature = model, temperature
        self.config = model.config.get_text_config()
        self.input_embedding, self.output_embedding = model.get_input_embeddings(), model.get_output_embeddings()
        self.vocab_size = vocab_size or self.output_embedding.weight.shape[0]
        self.softcap = getattr(self.config, "final_logit_softcapping", None)
        self.unknown = None if known is None else ~known.to(self.device)

    @property
    def device(self) -> torch.device:
        """Device of the input embedding."""
        return self.input_embedding.weight.device

    @property
    def name(self) -> str:
        """What messages call it: the folder or hub id that it was loaded from, or else its class."""
        return self.model.config.name_or_path or type(self.model).__name__

    @property
    def hidden_size(self) -> int:
        """Size H of the hidden states at the tap."""
        return self.output_embedding.weight.shape[1]

    @property
    def window(self) -> int:
        """Number of positions that the model was made for."""
        return getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "seq_length", None) or 2**31

    @property
    def probs_dtype(self) -> torch.dtype:
        """Type that probabilities are computed in, float32 or wider."""
        return torch.promote_types(self.output_embedding.weight.dtype, torch.float32)

    def hidden_states(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        """Return the hidden states (B, T, H) that the output embedding reads, for `tokens` (B, T)."""
        return self.model.base_model(input_ids=tokens, **kwargs).last_hidden_state.to(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of `hidden` (..., H), float32 or wider, without those of padded vocabulary entries."""
        hidden = hidden.to(self.output_embedding.weight.device)
        logits = at_least_float32(self.output_embedding(hidden)[..., : self.vocab_size]).to(self.device)
        logits = logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        return self._without_unknown(logits if self.temperature == 1 else logits / self.temperature)

    def _without_unknown(self, logits: Tensor) -> Tensor:
        return logits if self.unknown is None else logits.masked_fill(self.unknown, -torch.inf)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings (..., E) of `tokens` (...)."""
        return self.input_embedding(tokens)

    @torch.no_grad()
    def check(self) -> None:
        """Raise UserError unless `logits(hidden_states(x))` are the model's over the temperature; a scaled output differs."""
        tokens = torch.arange(4, device=self.device)[None] % self.vocab_size
        expected = self.model(input_ids=tokens, use_cache=False).logits[..., : self.vocab_size].float() / self.temperature
        scale = expected.abs().max().item()
        expected = self._without_unknown(expected.to(self.device))
        logits = self.logits(self.hidden_states(tokens, use_cache=False)).float().to(expected.device)
        if not torch.allclose(logits, expected, atol=1e-2 * scale, rtol=0, equal_nan=True):
            raise UserError(
                f"{type(self.model).__name__} changes its logits after the output embedding in a way that is not supported "
                f"(largest difference {(logits - expected).abs().max():.3g}); use a model of a supported family (Llama, Qwen2, "
                "Qwen3, Gemma 2, OPT, BLOOM, GPT-NeoX)."
            )


def place_of_layers(model: PreTrainedModel) -> str:
    """Return the name of the module list that holds a model's layers; raises UserError if there is none."""
    count = model.config.get_text_config().num_hidden_layers
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return name
    raise UserError(f"the layers of {type(model).__name__} are not found.")


def draft_temperature(draft: PreTrainedModel) -> float:
    """Return the number that divides this draft's logits, and no target's: `draft_temperature` of its config, or else 1."""
    return getattr(draft.config.get_text_config(), DRAFT_TEMPERATURE, 1.0)


def set_draft_temperature(draft: PreTrainedModel, temperature: float) -> None:
    """Write a temperature into the draft's config, with which it is saved; a pair's `draft_lm` of before keeps its own."""
    setattr(draft.config.get_text_config(), DRAFT_TEMPERATURE, float(temperature))


def avoid_cudnn_attention() -> None:
    """Have torch's attention choose among its other kernels; every model is read through a LanguageModel, which calls this.

    On Hopper and later cuDNN's attention is torch's first choice. It builds a plan for each new shape, which takes a good part of
    a second, and texts have a new length at every step. Its gradients under masks have been NaN (pytorch issue 196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # a flag of the process, which touches no device


def load_tokenizer(location: str | Path, revision: str | None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub id. Raises UserError if it cannot be loaded."""
    if is_synthetic(location):
        return synthetic_tokenizer(str(location))
    return from_pretrained(AutoTokenizer, location, revision, "tokenizer", trust_remote_code=trust_remote_code)


def load_model(
    location: str | Path,
    revision: str | None,
    dtype: str | torch.dtype,
    device: str,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> PreTrainedModel:
    """Return a model for inference, its weights on `device` or where `device_map` spreads them; see `chosen_dtype`.

    Raises:
        UserError: the model cannot be loaded.
    """
    dtype = chosen_dtype(dtype, location, revision, device, device_map, trust_remote_code)
    if is_synthetic(location):
        model = synthetic_model(str(location), dtype, device)
        model = quantize(model, quantization) if quantization else model
    else:
        keys: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        if device_map:
            keys["device_map"] = device_map
        elif quantization and torch.device(device).type != "cpu":
            keys["device_map"] = {"": device}  # some layouts can only be made on the GPU
        if quantization:
            model = _quantized(location, revision, quantization, keys)
        else:
            model = from_pretrained(AutoModelForCausalLM, location, revision, **keys)
        model = model if "device_map" in keys else model.to(device)
    return model.requires_grad_(False).eval()


def _quantized(location: str | Path, revision: str | None, name: str, keys: dict[str, Any]) -> PreTrainedModel:
    """Return a model that is quantized while it is read; raises UserError where this machine cannot."""
    config = QUANTIZATIONS[name].make()
    try:
        return from_pretrained(AutoModelForCausalLM, location, revision, quantization_config=config, **keys)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{location} cannot be loaded in quantization={name} on this machine; int8 and fp8 need no special GPU. The log has "
            f"the reason of each weight: {str(error).splitlines()[0]}"
        ) from error


def weightless_model(
    location: str | Path,
    revision: str | None,
    dtype: str | torch.dtype,
    device: str,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> PreTrainedModel:
    """Return what `load_model` does, but without weights, for a process that only needs its shape; `quiet` logs no type."""
    dtype = chosen_dtype(dtype, location, revision, device, device_map, trust_remote_code, quiet)
    if is_synthetic(location):
        return synthetic_model(str(location), dtype, "meta").requires_grad_(False).eval()
    config = from_pretrained(AutoConfig, location, revision, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=config.dtype if dtype == "auto" else dtype, trust_remote_code=trust_remote_code
        )
    with suppress(OSError, ValueError):  # a model without one keeps that of its config
        folder, given = resolve(location), {"revision": revision} if revision else {}
        model.generation_config = GenerationConfig.from_pretrained(folder, **given)
    return model.requires_grad_(False).eval()


def checked_device(device: str | None) -> str:
    """Return the device for models; None is cuda if there is one, and each process of a training run takes its own.

    Raises:
        UserError: the device does not exist here.
    """
    if device is None:
        rank = os.environ.get("LOCAL_RANK")
        return ("cuda" if rank is None else f"cuda:{rank}") if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises for unknown names, and for a build without that device
        raise UserError(
            f"device={device!r} cannot be used here ({str(error).splitlines()[0]}); use cpu, or null to choose automatically."
        ) from None
    return device


def checked_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return "auto" or the torch dtype of a name. Raises UserError for anything else."""
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype == "auto":
        return dtype
    if isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point:
        return torch_dtype
    raise UserError(f"dtype={dtype!r} must be a floating-point type; use auto, float32, bfloat16, float16 or float64.")


def chosen_dtype(
    dtype: str | torch.dtype,
    location: str | Path,
    revision: str | None,
    device: str,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> str | torch.dtype:
    """Return the type to load a model in, which is "auto" where transformers shall take the checkpoint's.

    On a CPU, "auto" becomes bfloat16 if the CPU has instructions for products of matrices in it, or else float32: what is faster,
    whether the checkpoint is in 16 or 32 bit. With instructions for vectors alone only a checkpoint in bfloat16 keeps that type,
    for its memory. Checkpoints in float64 and quantized ones keep their type, as all do on a GPU.

    Source: docs/measurements/archive.md, bfloat16 on a CPU.
    """
    if torch.device(device).type != "cpu" or (device_map and torch.cuda.is_available()):
        return dtype
    if dtype == torch.bfloat16 and not has_instructions(*MATRIX_INSTRUCTIONS, *VECTOR_INSTRUCTIONS):
        _warn_of_slow_bfloat16()
    if dtype != "auto":
        return dtype
    stored = torch.bfloat16
    if not is_synthetic(location):
        config = from_pretrained(AutoConfig, location, revision, trust_remote_code=trust_remote_code)
        stored = config.get_text_config().dtype or config.dtype
        if stored == torch.float64 or getattr(config, "quantization_config", None):
            return dtype
    usable = MATRIX_INSTRUCTIONS + (VECTOR_INSTRUCTIONS if stored == torch.bfloat16 else ())
    chosen = torch.bfloat16 if has_instructions(*usable) else torch.float32
    stored_name = "a type that its config does not name" if stored is None else short_name(stored)
    level = logging.DEBUG if quiet else logging.INFO
    logger.log(level, "dtype=auto: %s runs in %s, its weights are stored in %s", location, short_name(chosen), stored_name)
    return chosen


def has_instructions(*names: str) -> bool:
    """Whether this CPU has some of these instructions, and torch the library that uses them."""
    known = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and any(known.get(name) for name in names)


def short_name(dtype: torch.dtype) -> str:
    """Return the name that `dtype=` has on command lines."""
    return str(dtype).removeprefix("torch.")


@cache  # a pair has two models, and one warning is enough
def _warn_of_slow_bfloat16() -> None:
    logger.warning("dtype=bfloat16 is slow on this CPU, which has no instructions for it; dtype=float32 is faster")
