"""A causal language model as decoding and training use it, and how it is loaded.

The *tap*, which heads read, is the input of a model's output embedding, which `model.base_model`
returns.
"""

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers import AutoHfQuantizer
from transformers.utils.peft_utils import find_adapter_config_file

from specheads.errors import UserError, is_out_of_memory
from specheads.pair.config import PairConfig
from specheads.pair.draft_vocabulary import FORM, SIZE, kept_tokens, restore, set_output
from specheads.pair.quantization import QUANTIZATIONS, is_quantized, round_weights
from specheads.pair.revisions import from_pretrained, resolve, without_warnings
from specheads.pair.sampling import at_least_float32
from specheads.pair.source import ModelSource
from specheads.pair.synthetic import (
    is_synthetic,
    synthetic_config,
    synthetic_model,
    synthetic_tokenizer,
)

logger = logging.getLogger(__name__)

# What torch calls the instructions for products of bfloat16 numbers, of matrices (x86's AMX, ARM's
# BFMMLA) and of vectors.
_MATRIX_INSTRUCTIONS = ("amx_bf16", "bf16", "sve_bf16")
_VECTOR_INSTRUCTIONS = ("avx512_bf16",)

_FACTORS = ("lm_head_multiplier", "output_multiplier")  # what configs call a factor of logits
# And what divides them, or the states that they are computed from
_DIVISORS = "logits_scaling", "logits_mup_width_multiplier"
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


# Bits of float32 activations in products with prepacked weights of 8 and 5 bits
INPUT_BITS = {"float32": 32, "int16": 16, "int8": 8}


class LanguageModel:
    """A causal language model as two steps: tokens -> hidden states (the tap) -> logits over the
    shared vocabulary.

    Inputs and outputs are on the device of its input embedding. `temperature` divides its logits
    wherever they are used. Tokens that it does not know (`known`, (V,) bool; None: all), or that
    its output lacks, have a logit of minus infinity.
    """

    # Whether forward passes must be given masks that say everything, padding and order included
    explicit_masks = False
    # Of activations in products with prepacked weights of 8 and 5 bits, see INPUT_BITS
    input_bits = 32
    # Of the target, whose inputs (B, T, H) it reads as a draft; input i is what transformers calls
    # `hidden_states[i]`
    reads_layers: tuple[int, ...] = ()
    num_skipped = 0  # tokens at a text's beginning that it does not read

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int | None = None,
        temperature: float = 1.0,
        known: Tensor | None = None,
    ) -> None:
        # On Hopper and later cuDNN's attention is torch's first choice. It builds a plan for each
        # new shape, which takes a good part of a second, and its gradients under masks have been
        # NaN (pytorch issue 196678).
        # A flag of the process, which touches no device
        torch.backends.cuda.enable_cudnn_sdp(False)
        if type(model).__module__.startswith("peft."):
            raise UserError(
                f"a {type(model).__name__} wraps a model, which cannot be run in steps; give the"
                " model that its merge_and_unload() returns."
            )
        self.model = model
        self.temperature = temperature
        self.config = model.config.get_text_config()
        self.input_embedding = model.get_input_embeddings()
        self.output_embedding = model.get_output_embeddings()
        self.vocab_size = vocab_size or self.output_embedding.weight.shape[0]
        # Cohere's is of the model
        self.factor = _logit_factor(self.config) * (getattr(model, "logit_scale", None) or 1.0)
        self.softcap = next(
            (cap for name in _CAPS if (cap := getattr(self.config, name, None)) is not None), None
        )
        self.unknown = None if known is None else ~known.to(self.device)

    @property
    def device(self) -> torch.device:
        """Device of the input embedding."""
        return self.input_embedding.weight.device

    @property
    def placement(self) -> str:
        """The type of its weights, and its device."""
        return f"{str(self.output_embedding.weight.dtype).removeprefix('torch.')} on {self.device}"

    @property
    def name(self) -> str:
        """What messages call it: the folder or hub id that it was loaded from, or else its
        class.
        """
        return self.model.config.name_or_path or type(self.model).__name__

    @property
    def hidden_size(self) -> int:
        """Size H of the hidden states at the tap."""
        return self.output_embedding.weight.shape[1]

    @property
    def window(self) -> int:
        """Number of positions that the model was made for, and reads by one set of LongRoPE's
        frequencies.
        """
        names = ("max_position_embeddings", "seq_length", "max_seq_len")
        most = next((most for name in names if (most := getattr(self.config, name, None))), 2**31)
        return min(
            [most, *_lengths_of_longrope(getattr(self.config, "rope_parameters", None) or {})]
        )

    @property
    def layer_configs(self) -> list[PreTrainedConfig]:
        """The config of each layer: where their sizes differ, as in Gemma 4, the model's config
        refuses to name one.
        """
        if getattr(self.config, "is_heterogeneous", False):
            return list(self.config.per_layer_config)
        return [self.config] * self.config.num_hidden_layers

    @property
    def cache_layers(self) -> int:
        """Number of layers that its KV cache has."""
        return self.config.num_hidden_layers

    @property
    def probs_dtype(self) -> torch.dtype:
        """Type that probabilities are computed in, float32 or wider."""
        return torch.promote_types(self.output_embedding.weight.dtype, torch.float32)

    @property
    def body(self) -> nn.Module:
        """The model without its output embedding."""
        base_model = self.model.base_model
        # Llama 4's prefix names no part of it
        return base_model.model if base_model is self.model else base_model

    def hidden_states(self, tokens: Tensor, **kwargs: object) -> Tensor:
        """Return the hidden states (B, T, H) that the output embedding reads, for `tokens` (B,
        T).
        """
        return self.body(input_ids=tokens, **kwargs).last_hidden_state.to(self.device)

    def states_along(self, tokens: Tensor) -> Tensor:
        """Return the hidden states (B, T, H) after each token (B, T) of right-padded texts."""
        return self.hidden_states(tokens, use_cache=False)

    @contextmanager
    def noting_inputs(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """While it is active, each forward pass writes the inputs (B, T, H) of some layers into the
        returned dict, by the layers' numbers.

        The hooks are there for these passes alone: a model with hooks would not be packed, nor its
        steps cached.
        """
        modules = self.model.get_submodule(place_of_layers(self.model))
        noted: dict[int, Tensor] = {}
        thread = threading.get_ident()  # others may read with the same model meanwhile

        def note(
            layer: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
        ) -> None:
            if threading.get_ident() == thread:
                noted[layer] = args[0] if args else kwargs["hidden_states"]

        handles = []
        for layer in layers:
            module = modules.get_submodule(str(layer))
            handles.append(module.register_forward_pre_hook(partial(note, layer), with_kwargs=True))
        try:
            yield noted
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def check_inputs(self, layers: Sequence[int]) -> None:
        """Raise UserError unless these layers have inputs (B, T, H), which a draft can read."""
        tokens = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        with self.noting_inputs(layers) as inputs:
            self.states_along(tokens)
        expected = 1, 2, self.config.hidden_size
        for layer in layers:
            shape = tuple(inputs[layer].shape) if layer in inputs else ()
            if shape != expected:
                raise UserError(
                    f"the draft reads the input of layer {layer} of {type(self.model).__name__},"
                    f" which is of shape {shape} for two tokens, but expected {expected}; choose a"
                    " target of another architecture, or a draft that reads tokens alone."
                )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of `hidden` (..., H), float32 or wider, without those of padded
        vocabulary entries.
        """
        return self.spread(self.kept_logits(hidden))

    @property
    def kept_tokens(self) -> Tensor | None:
        """The tokens (V_kept,) long that its output has, ascending; None: all V."""
        return kept_tokens(self.model)

    def kept_logits(self, hidden: Tensor) -> Tensor:
        """Return what `logits` does for `kept_tokens` alone, (..., V_kept)."""
        output = self.output_embedding
        return self._of_known(self._scaled(output(hidden.to(output.weight.device))))

    def logits_of(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits (..., n) of some `tokens` (n,) long of a model whose output has all,
        without computing the others where its weights are plain.
        """
        output = self.output_embedding
        if type(output) is not nn.Linear or type(output.weight) is not nn.Parameter:
            return self.logits(hidden)[..., tokens]
        bias = None if output.bias is None else output.bias[tokens]
        rows = nn.functional.linear(hidden.to(output.weight.device), output.weight[tokens], bias)
        return self._scaled(rows) / self.temperature

    def _scaled(self, output: Tensor) -> Tensor:
        """Return the logits (...) that the output embedding's numbers (...) stand for."""
        logits = at_least_float32(output).to(self.device)
        logits = logits if self.factor == 1 else logits * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _of_known(self, logits: Tensor) -> Tensor:
        """Return the model's logits (..., V_kept) over the temperature, without padded entries and
        minus infinity if unknown.
        """
        kept = self.kept_tokens
        unknown = self.unknown
        logits = logits[..., : self.vocab_size] if kept is None else logits
        logits = logits if self.temperature == 1 else logits / self.temperature
        if unknown is not None:
            logits = logits.masked_fill(unknown if kept is None else unknown[kept], -torch.inf)
        return logits

    def spread(self, numbers: Tensor, others: float = -torch.inf) -> Tensor:
        """Return the numbers (..., V) of all tokens from those (..., V_kept) of the kept ones: of
        logits, unless it is said what the `others` have.
        """
        kept = self.kept_tokens
        if kept is None:
            return numbers
        every = numbers.new_full((*numbers.shape[:-1], self.vocab_size), others)
        return every.index_copy(-1, kept, numbers)

    def tokens_at(self, places: Tensor) -> Tensor:
        """Return the tokens (...) at places (...) of the output."""
        kept = self.kept_tokens
        return places if kept is None else kept[places]

    @property
    def lacking(self) -> Tensor | None:
        """The tokens (V,) bool that it never proposes; None: there are none."""
        kept = self.kept_tokens
        if kept is None:
            return self.unknown
        lacking = torch.ones(self.vocab_size, dtype=torch.bool, device=kept.device).index_fill(
            0, kept, False
        )
        return lacking if self.unknown is None else lacking | self.unknown

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings (..., E) of `tokens` (...)."""
        return self.input_embedding(tokens)

    @torch.no_grad()
    def check(self) -> None:
        """Raise UserError unless it reads tokens alone, and `logits(hidden_states(x))` are its
        logits over the temperature.
        """
        tokens = torch.arange(4, device=self.device)[None] % self.vocab_size
        try:
            expected = self.model(input_ids=tokens, use_cache=False).logits.float().to(self.device)
        except ValueError as error:  # what else it needs, a language for example
            raise UserError(
                f"{type(self.model).__name__} does not read tokens alone ({error}); choose another"
                " model."
            ) from error
        if not expected.isfinite().all():
            check_numbers(self.model, expected)
        scale = expected[expected.isfinite()].abs().max().item() / self.temperature
        expected = self._of_known(expected)
        logits = self.kept_logits(self.hidden_states(tokens, use_cache=False)).float()
        if not torch.allclose(logits, expected, atol=1e-2 * scale, rtol=0):
            raise UserError(
                f"{type(self.model).__name__} changes its logits after the output embedding in a"
                " way that is not supported (largest difference"
                f" {(logits - expected).abs().max():.3g}); use a model of a supported family"
                " (Llama, Qwen2, Qwen3, Gemma 2, OPT, BLOOM, GPT-NeoX)."
            )


def check_numbers(model: PreTrainedModel, logits: Tensor) -> None:
    """Raise UserError for weights that are NaN or infinite, and for logits that are, except those
    that a model sets to minus infinity.
    """
    name = model.name_or_path or type(model).__name__
    for key, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.isfinite().all():
            count = int((~weight.isfinite()).sum())
            raise UserError(
                f"{name}: the weights {key} hold {count} of {weight.numel()} numbers that are NaN"
                " or infinite; download or convert the checkpoint again."
            )
    if logits.isnan().any() or logits.isposinf().any():
        raise UserError(
            f"{name} gives NaN or infinite logits for its first tokens, although all its weights"
            f" are finite: {short_name(model.dtype)} is too narrow for it; use"
            " model.dtype=float32, or bfloat16 in place of float16."
        )


def _logit_factor(config: PreTrainedConfig) -> float:
    """Return what a model multiplies its output embedding's result by, before any cap."""
    # Which multiplies by its `logits_scaling`
    divisors = () if config.model_type.startswith("hyperclovax") else _DIVISORS
    factors = _FACTORS if divisors else (*_FACTORS, *_DIVISORS)
    product = math.prod(getattr(config, name, None) or 1.0 for name in factors)
    return float(product / math.prod(getattr(config, name, None) or 1.0 for name in divisors))


def _lengths_of_longrope(parameters: Mapping[str, Any]) -> list[int]:
    """Return the lengths at which LongRoPE changes frequencies.

    Some models have parameters for each kind of layer.
    """
    lengths = list[int]()
    for each in parameters.values():
        if isinstance(each, Mapping):
            lengths += _lengths_of_longrope(each)
    if parameters.get("rope_type") == "longrope":
        lengths.append(parameters["original_max_position_embeddings"])
    return lengths


def place_of_layers(model: PreTrainedModel) -> str:
    """Return the name of the module list that holds a model's layers: of its decoder, where parts
    that read images have as many.

    Raises UserError if there is none.
    """
    count = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for whole in (decoder, model):
        within = {id(part) for part in whole.modules()}
        for name, part in model.named_modules():
            if isinstance(part, nn.ModuleList) and len(part) == count and id(part) in within:
                return name
    raise UserError(f"the layers of {type(model).__name__} are not found.")


def load_tokenizer(
    location: str | Path, revision: str | None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub id. Raises UserError if it cannot be loaded."""
    if is_synthetic(location):
        return synthetic_tokenizer(location)
    return from_pretrained(
        transformers.AutoTokenizer,
        location,
        revision,
        "tokenizer",
        trust_remote_code=trust_remote_code,
    )


def tokenizer_of(config: PairConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a pair. Raises UserError if it cannot be loaded."""
    return load_tokenizer(
        config.tokenizer or config.target,
        None if config.tokenizer else config.target_revision,
        config.trust_remote_code in (True, "target"),
    )


def load_model(source: ModelSource) -> PreTrainedModel:
    """Return a model for inference, on its device or spread by its `device_map`.

    Raises UserError if it cannot be loaded.
    """
    location = source.location
    quantization = source.quantization
    dtype = chosen_dtype(source)
    if source.dtype != dtype:
        logger.info("dtype=auto: %s runs in %s", location, short_name(dtype))
    if is_synthetic(location):
        if quantization:
            raise UserError(
                f"quantization={quantization} is for models that are read from files; leave it out"
                f" for {location}."
            )
        return synthetic_model(location, dtype, source.device).requires_grad_(False).eval()
    keys: dict[str, Any] = {
        "dtype": dtype,
        "trust_remote_code": source.trust_remote_code,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are named below
    }
    config = stored_config(source)
    _check_stored(config, location)
    # Its output follows, as weights in 8 bits do
    is_partial = any(getattr(config, name, None) is not None for name in (SIZE, FORM))
    if source.device_map:
        keys["device_map"] = source.device_map
    elif quantization and torch.device(source.device).type != "cpu":
        keys["device_map"] = {"": source.device}  # some layouts can only be made on the GPU
    if quantization and not source.rounded_form:
        keys["quantization_config"] = QUANTIZATIONS[quantization].make()
    try:
        with without_warnings():
            model, read = from_pretrained(
                transformers.AutoModelForCausalLM, location, source.revision, **keys
            )
    except RuntimeError as error:
        if quantization is None or is_out_of_memory(error):
            raise
        raise UserError(
            f"{location} cannot be loaded in quantization={quantization} on this machine; int8"
            " needs no special GPU. The log has the reason of each weight:"
            f" {str(error).splitlines()[0]}"
        ) from error
    if is_partial:
        restore(model, location, source.revision)
    else:
        _check_read(read, location, type(model).__name__)
    round_to_form(model, source)
    model = model if "device_map" in keys else model.to(source.device)
    return model.requires_grad_(False).eval()


def round_to_form(model: PreTrainedModel, source: ModelSource) -> None:
    """Round the weights of a model to the form that its source asks for, if any.

    Raises UserError for one that is quantized already.
    """
    if source.rounded_form is None:
        return
    if is_quantized(model):
        raise UserError(
            f"{source.location} is quantized already; leave out quantization={source.quantization}."
        )
    share = round_weights(model, source.rounded_form)
    how = (
        "quantization=%s: %s is another model from here on, with %.0f %% of its weights rounded to"
        " %s"
    )
    logger.info(how, source.quantization, source.location, 100 * share, source.rounded_form)


def _check_read(read: Mapping[str, Any], location: str | Path, architecture: str) -> None:
    """Log a warning for tensors of a checkpoint that its model does not have.

    Raises UserError for weights that it lacks, or has in another shape.
    """
    if mismatched := sorted(read["mismatched_keys"]):
        (name, stored, expected), *others = mismatched
        raise UserError(
            f"{location} has {name} in the shape {list(stored)}, but its config asks for"
            f" {list(expected)}{_and_others(others)}; is its config.json another model's?"
        )
    if missing := sorted(read["missing_keys"]):
        name, *others = missing
        raise UserError(
            f"{location} has no weights for {name}{_and_others(others)} of {architecture}, which"
            " would be random; expected the checkpoint of a whole causal language model."
        )
    if unused := sorted(read["unexpected_keys"]):
        name, *others = unused
        logger.warning(
            "%s holds the tensor %s%s, which %s does not use; is its config.json this model's?",
            location,
            name,
            _and_others(others),
            architecture,
        )


def _and_others(others: Sequence[object]) -> str:
    return f" and {len(others)} others" if others else ""


def _check_stored(config: PreTrainedConfig, location: str | Path) -> None:
    """Raise UserError for a checkpoint in a format that transformers does not know: it would take
    the stored numbers unchanged.
    """
    stored = getattr(config, "quantization_config", None) or {}
    with without_warnings():
        if not stored or AutoHfQuantizer.supports_quant_method(stored):
            return
    raise UserError(
        f"{location} stores its weights by the method {stored.get('quant_method')}, which"
        " transformers does not read; give the checkpoint without quantization, with"
        " model.quantization=int8 where memory is short, or one in GGUF, GPTQ, AWQ or"
        " compressed-tensors."
    )


def weightless_model(source: ModelSource) -> PreTrainedModel:
    """Return what `load_model` does, but without weights, for a process that only needs its
    shape.
    """
    config = stored_config(source)
    dtype = chosen_dtype(source)
    with torch.device("meta"):
        dtype = config.dtype if dtype == "auto" else dtype
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=source.trust_remote_code
        )
        if (size := getattr(config, SIZE, None)) is not None:
            set_output(model, model.get_output_embeddings().weight[:size], torch.arange(size))
    with suppress(OSError, ValueError):  # a model without one keeps that of its config
        model.generation_config = transformers.GenerationConfig.from_pretrained(
            resolve(source.location), revision=source.revision or "main"
        )
    return model.requires_grad_(False).eval()


def stored_config(source: ModelSource) -> PreTrainedConfig:
    """Return the config of a model. Raises UserError if it cannot be loaded."""
    if is_synthetic(source.location):
        return synthetic_config(source.location)
    config = from_pretrained(
        transformers.AutoConfig,
        source.location,
        source.revision,
        trust_remote_code=source.trust_remote_code,
    )
    # With peft installed transformers would add the adapter to the model, and without it leave it
    # out
    if find_adapter_config_file(resolve(source.location), revision=source.revision) is not None:
        raise UserError(
            f"{source.location} holds a PEFT adapter next to a model; merge it (peft's"
            " merge_and_unload) and save that in another folder, or remove adapter_config.json for"
            " the model without it."
        )
    return config


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has put adapters into a model, which may be switched at any time."""
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def chosen_dtype(source: ModelSource) -> Any:
    """Return the type to load a model in, "auto" where transformers shall take the checkpoint's.

    On a CPU, "auto" is bfloat16 if it has instructions for products of matrices in it (or only of
    vectors, for checkpoints in it) and else float32. Float64 and quantized checkpoints keep their
    type, as all do on a GPU; weights that are rounded run in float32, the type in which steps store
    them in few bits. Source: docs/measurements/archive.md, bfloat16 on a CPU.
    """
    on_gpu = torch.device(source.device).type != "cpu"
    if source.dtype != "auto" or on_gpu or (source.device_map and torch.cuda.is_available()):
        return source.dtype
    config = stored_config(source)
    stored = config.get_text_config().dtype or config.dtype
    if stored == torch.float64 or getattr(config, "quantization_config", None):
        return source.dtype
    if source.rounded_form:
        return torch.float32
    usable = _MATRIX_INSTRUCTIONS + (_VECTOR_INSTRUCTIONS if stored == torch.bfloat16 else ())
    return torch.bfloat16 if _has_instructions(*usable) else torch.float32


def _has_instructions(*names: str) -> bool:
    """Whether this CPU has some of these instructions, and torch the library that uses them."""
    known = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and any(known.get(name) for name in names)


def short_name(dtype: torch.dtype) -> str:
    """Return the name that `dtype=` has on command lines."""
    return str(dtype).removeprefix("torch.")
