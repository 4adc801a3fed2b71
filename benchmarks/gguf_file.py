"""Write a model of the Llama family as a GGUF file, which llama.cpp reads.

Weights keep their values and their dtype (norms are float32, as llama.cpp wants them). The vocabulary is made of placeholders:
tokens go in and come out as ids, so that any tokenizer will do. None of them ends a response.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

FAMILY = ("llama", "mistral")
ROPE_TYPES = ("default", "linear", "llama3")
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def obstacle(model: PreTrainedModel) -> str | None:
    """Return why a model cannot be written, None if it can."""
    config, dtype = model.config, model.get_input_embeddings().weight.dtype
    if config.model_type not in FAMILY:
        return f"its architecture is {config.model_type}, and this script writes {' and '.join(FAMILY)} alone"
    if getattr(config, "sliding_window", None):
        return "it has sliding windows"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"its weights are {dtype}; choose --dtype float32 or bfloat16"
    if config.rope_parameters["rope_type"] not in ROPE_TYPES:
        return f"its rope type is {config.rope_parameters['rope_type']}, and this script writes {', '.join(ROPE_TYPES)}"
    unknown = [name for name in model.state_dict() if _gguf_name(name) is None]
    return f"it has {len(unknown)} other weights, {unknown[0]} first" if unknown else None


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Write `model`, which must have no obstacle, to `path`."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    config = model.config
    _add_shape(writer, config, model.get_input_embeddings().weight.shape[0])
    types = {torch.float32: gguf.GGMLQuantizationType.F32, torch.bfloat16: gguf.GGMLQuantizationType.BF16}
    for name, weight in gguf_tensors(model):
        stored = types[weight.dtype]
        writer.add_tensor(name, gguf.quants.quantize(weight.float().numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of the file; a tied output matrix is left out."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        written = _gguf_name(name)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part = written.split(".")[-2]
        weight = weight.detach().cpu()
        if part in heads:
            weight = interleaved(weight, heads[part])
        yield written, weight if weight.ndim > 1 else weight.float()
    if config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config)


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Return the rows of a query or key matrix as llama.cpp rotates them: neighbours instead of the two halves of a head."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def _gguf_name(name: str) -> str | None:
    """Return what a weight is called in the file, None for one that has no place there."""
    if not name.endswith(".weight"):
        return None
    stem = name.removesuffix(".weight")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.weight"
    if not stem.startswith("model.layers."):
        return None
    number, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{LAYER_NAMES[part]}.weight" if part in LAYER_NAMES else None


def _add_shape(writer: "gguf.GGUFWriter", config: "PreTrainedConfig", vocab_size: int) -> None:  # noqa: F821
    """Add the shape of the model and the vocabulary of placeholders."""
    rope, head_size = config.rope_parameters, _head_size(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type("linear")
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(vocab_size)
    writer.add_tokenizer_model("rwkv")  # the one kind without a begin and an end
    writer.add_token_list([f"t{number}" for number in range(vocab_size)])
    writer.add_token_types([1] * vocab_size)  # ordinary tokens


def _head_size(config: "PreTrainedConfig") -> int:  # noqa: F821
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _llama3_factors(config: "PreTrainedConfig") -> Tensor:  # noqa: F821
    """Return by how much each frequency is divided."""
    rope, size = config.rope_parameters, _head_size(config)
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    lengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    smooth = ((context / lengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()
