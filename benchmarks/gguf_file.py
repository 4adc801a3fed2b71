"""Write a model of the Llama family as a GGUF file, which llama.cpp reads.

Norms are float32, as llama.cpp wants them. The vocabulary is made of placeholders: tokens go in and
come out as ids, so that any tokenizer will do, which llama.cpp's own converter must know. None of
them ends a response.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.pair.draft_vocabulary import KEPT, SIZE, kept_tokens

FAMILY = ("llama", "mistral")
NEVER = -1e9  # a logit of probability zero


def obstacle(model: PreTrainedModel) -> str | None:
    """Return why a model cannot be written, None if it can."""
    config = model.config
    dtype = model.get_input_embeddings().weight.dtype
    if config.model_type not in FAMILY:
        return (
            f"its architecture is {config.model_type}, and this script writes"
            f" {' and '.join(FAMILY)} alone"
        )
    if getattr(config, "sliding_window", None):
        return "it has sliding windows"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"its weights are {dtype}; choose --dtype float32 or bfloat16"
    if config.rope_parameters["rope_type"] != "default":
        return (
            f"its rope type is {config.rope_parameters['rope_type']}, and this script writes none"
            " but default"
        )
    known = (".weight", "lm_head.bias")
    return "it has biases" if any(not name.endswith(known) for name in model.state_dict()) else None


@torch.no_grad()
def complete_output(draft: PreTrainedModel) -> None:
    """Give a draft with an output over some tokens one over all, which other engines need, with a
    bias against the others.
    """
    kept = kept_tokens(draft)
    rows = draft.get_output_embeddings().weight
    if kept is None:
        return
    size, hidden_size = draft.get_input_embeddings().weight.shape
    output = nn.Linear(hidden_size, size).requires_grad_(False)
    output.weight.data = rows.new_zeros(size, hidden_size).index_copy(0, kept, rows)
    output.bias.data = rows.new_full((size,), NEVER).index_fill(0, kept, 0)
    draft.set_output_embeddings(output)
    setattr(draft, KEPT, None)
    setattr(draft.config, SIZE, None)


def write_gguf(
    model: PreTrainedModel, path: Path, stored: str | None = None, source: Path | None = None
) -> None:
    """Write `model`, which must have no obstacle, to `path`, its matrices as `stored`, such as F16
    or Q8_0; None: their type.

    The tensors of `source`, a GGUF file of the model, are written as they are in place of the
    model's.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), _architecture(model))
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
    for name, weight in gguf_tensors(model) if source is None else ():
        kind = gguf.GGMLQuantizationType[
            stored if stored and weight.ndim > 1 else types[weight.dtype]
        ]
        if weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = (
                gguf.GGMLQuantizationType.F16
            )  # rows of no whole number of blocks, as llama.cpp's own converter does
        writer.add_tensor(name, gguf.quants.quantize(weight.float().numpy(), kind), raw_dtype=kind)
    for tensor in gguf.GGUFReader(source).tensors if source is not None else ():
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def file_type(path: Path) -> str:
    """Return the type of most matrices of a GGUF file, such as Q4_1."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return Counter(
        tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1
    ).most_common(1)[0][0]


def _architecture(model: PreTrainedModel) -> str:
    """Return what llama.cpp is to take it for: its Llama has no bias of the output, and its Qwen2
    is one with such biases.
    """
    return "llama" if model.get_output_embeddings().bias is None else "qwen2"


def gguf_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of the file; a tied output matrix is left out."""
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads = heads if _architecture(model) == "llama" else {}
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
