"""The shapes of published models, from the config files on the hub, and tiny random models with
their proportions.
"""

import torch
from families import tiny_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)


def _llama(hidden_size, intermediate_size, layers, heads, kv_heads=None, tied=False, **more):
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        tie_word_embeddings=tied,
        **{"vocab_size": 32_000} | more,
    )


def _opt(size, layers, heads, **more):
    sizes = {"hidden_size": size, "ffn_dim": 4 * size, "word_embed_proj_dim": size} | more
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 50_272}
    return OPTConfig(**sizes, dropout=0.0)


def _bloom(hidden_size, layers, heads):
    return BloomConfig(hidden_size=hidden_size, n_layer=layers, n_head=heads, vocab_size=250_880)


def _pythia(size, layers, heads):
    sizes = {"hidden_size": size, "intermediate_size": 4 * size, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "vocab_size": 50_304}
    return GPTNeoXConfig(**sizes, tie_word_embeddings=False)


def _qwen3(size, intermediate_size, layers, heads, tied=False):
    sizes = {"hidden_size": size, "intermediate_size": intermediate_size}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 151_936}
    return Qwen3Config(**sizes, num_key_value_heads=8, head_dim=128, tie_word_embeddings=tied)


_LLAMA_7B = _llama(4096, 11_008, 32, 32)
_LLAMA_13B = _llama(5120, 13_824, 40, 40)
SHAPES: dict[str, PretrainedConfig] = {
    "meta-llama/Llama-2-7b-chat-hf": _LLAMA_7B,
    "meta-llama/Llama-2-13b-chat-hf": _LLAMA_13B,
    "meta-llama/Llama-2-70b-chat-hf": _llama(8192, 28_672, 80, 64, 8),
    "meta-llama/Llama-2-13b-hf": _LLAMA_13B,
    "meta-llama/Llama-3.2-1B-Instruct": _llama(
        2048, 8192, 16, 32, 8, tied=True, vocab_size=128_256, head_dim=64
    ),
    "meta-llama/Llama-3.1-8B-Instruct": _llama(4096, 14_336, 32, 32, 8, vocab_size=128_256),
    "huggyllama/llama-7b": _LLAMA_7B,
    "JackFram/llama-68m": _llama(768, 3072, 2, 12),
    "JackFram/llama-160m": _llama(768, 3072, 12, 12),
    "facebook/opt-125m": _opt(768, 12, 12),
    "facebook/opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "facebook/opt-13b": _opt(5120, 40, 40),
    "bigscience/bloom-560m": _bloom(1024, 24, 16),
    "bigscience/bloom-7b1": _bloom(4096, 30, 32),
    "EleutherAI/pythia-70m": _pythia(512, 6, 8),
    "EleutherAI/pythia-2.8b": _pythia(2560, 32, 32),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _llama(
        576, 1536, 30, 9, 3, tied=True, vocab_size=49_152
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _llama(2048, 8192, 24, 32, tied=True, vocab_size=49_152),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32),
    "Qwen/Qwen3-32B": _qwen3(5120, 25_600, 64, 64),
}
WINDOW = 160


def weightless(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of a shape on the device "meta"."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def tiny(config: PretrainedConfig, hidden_size: int, vocab_size: int, seed: int) -> PreTrainedModel:
    """Return a random model of two layers in float64 that is in all but its sizes like one of a
    published shape.

    Grouped queries stay grouped, tied embeddings tied, and a projection before the output embedding
    halves the states.
    """
    content = config.to_dict()
    heads = 4
    is_grouped = content.get("num_key_value_heads") != content.get("num_attention_heads")
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "head_dim": hidden_size // heads}
    sizes |= dict.fromkeys(("num_hidden_layers", "n_layer"), 2)
    sizes |= dict.fromkeys(("num_attention_heads", "n_head"), heads)
    sizes |= dict.fromkeys(("intermediate_size", "ffn_dim"), 2 * hidden_size)
    sizes |= dict.fromkeys(("max_position_embeddings", "seq_length"), WINDOW)
    sizes["num_key_value_heads"] = 2 if is_grouped else heads
    sizes["word_embed_proj_dim"] = hidden_size * content.get("word_embed_proj_dim", 0)
    sizes["word_embed_proj_dim"] //= config.hidden_size
    for name in ("model_type", "architectures", "dtype", "layer_types"):
        content.pop(name, None)
    sizes = {key: size for key, size in sizes.items() if key in content}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return tiny_model(type(config)(**content | sizes | ends), seed)
