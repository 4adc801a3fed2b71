"""Write a model of the Llama family as a GGUF file, which llama.cpp reads.

Norms are float32, as llama.cpp wants them. Tokens go in and come out as ids, so that any tokenizer
will do: that of another file, or placeholders, none of which ends a response.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.pair.draft_vocabulary import kept_tokens

NEVER = -1e9  # a logit of probability zero


@torch.no_grad()
def output_over_all(draft: PreTrainedModel) -> nn.Module:
    """Return an output over all tokens for a draft with one over some: it has a bias against the
    others.
    """
    kept = kept_tokens(draft)
    output = draft.get_output_embeddings()
    if kept is None:
        return output
    size, hidden_size = draft.get_input_embeddings().weight.shape
    complete = nn.Linear(hidden_size, size).requires_grad_(False)
    complete.weight.zero_()[kept] = output.weight.float()
    complete.bias.fill_(NEVER)[kept] = 0
    return complete


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    stored: str | None = None,
    tokenizer_file: Path | None = None,
) -> None:
    """Write `model` to `path`, its matrices as `stored`, such as F16 or Q8_0 (None: in their type),
    with the tokenizer of another GGUF file.
    """
    import gguf

    output = output_over_all(model)
    # llama.cpp's Llama has no bias of the output, and its Qwen2 is a Llama with one.
    writer = gguf.GGUFWriter(str(path), "llama" if output.bias is None else "qwen2")
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
    if tokenizer_file is None:
        writer.add_tokenizer_model("rwkv")  # the one kind without a begin and an end
        writer.add_token_list([f"t{number}" for number in range(vocab_size)])
        writer.add_token_types([1] * vocab_size)  # ordinary tokens
    else:
        for field in gguf.GGUFReader(tokenizer_file).fields.values():
            if field.name.startswith("tokenizer."):
                writer.add_key_value(field.name, field.contents(), *field.types)
    for name, weight in gguf_tensors(model, output):
        kind = gguf.GGMLQuantizationType[_form(weight, stored)]
        if weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = gguf.GGMLQuantizationType.F16  # of rows of no whole number of blocks
        writer.add_tensor(name, gguf.quants.quantize(weight.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _form(weight: Tensor, stored: str | None) -> str:
    if stored and weight.ndim > 1:
        return stored
    return {torch.float32: "F32", torch.bfloat16: "BF16"}[weight.dtype]


def gguf_tensors(model: PreTrainedModel, output: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of the file; a tied output matrix is left out."""
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, weight in model.state_dict().items():
        part = name.split(".")[-2]
        if part != "lm_head":
            in_pairs = part in heads and output.bias is None
            tensors[name] = interleaved(weight, heads[part]) if in_pairs else weight
    if not config.tie_word_embeddings or output.bias is not None:
        for name, weight in output.state_dict().items():
            tensors[f"lm_head.{name}"] = weight
    for name, weight in tensors.items():
        weight = weight.detach().cpu()
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
