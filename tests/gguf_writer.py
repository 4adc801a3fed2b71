"""Write a model of the Llama family as a GGUF file, which llama.cpp reads.

Norms are float32, as llama.cpp wants them. The vocabulary is made of placeholders: tokens go in and
come out as ids, so that any tokenizer will do, which llama.cpp's own converter must know. None of
them ends a response.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Write `model` to `path`, in its type."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    config = model.config
    vocab_size = model.get_input_embeddings().weight.shape[0]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(vocab_size)
    writer.add_tokenizer_model("rwkv")  # the one kind without a begin and an end
    writer.add_token_list([f"t{number}" for number in range(vocab_size)])
    writer.add_token_types([1] * vocab_size)  # ordinary tokens
    types = {torch.float32: "F32", torch.bfloat16: "BF16"}
    for name, weight in gguf_tensors(model):
        kind = gguf.GGMLQuantizationType[types[weight.dtype]]
        writer.add_tensor(name, gguf.quants.quantize(weight.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of the file; a tied output matrix is left out."""
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part = name.split(".")[-2]
        weight = weight.detach().cpu()
        if part in heads:
            weight = interleaved(weight, heads[part])
        yield (
            names.get_name(name, try_suffixes=(".weight", ".bias")),
            weight if weight.ndim > 1 else weight.float(),
        )


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Return the rows of a query or key matrix as llama.cpp rotates them: neighbours instead of the
    two halves of a head.
    """
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()
