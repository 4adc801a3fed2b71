"""Models of real shapes with random weights, made when they are loaded, to time engines (by
`verification=synthetic`).
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specheads.errors import UserError

_SYNTHETIC = "synthetic:"  # how a config names them, `synthetic:llama2-7b`
_SEED = 0
Shape = dict[str, object]  # arguments of LlamaConfig


def _shape(
    base: Shape, hidden: int, intermediate: int, layers: int, heads: int, **others: object
) -> Shape:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return base | sizes | others


_SMALL: Shape = {"vocab_size": 2048, "max_position_embeddings": 2048}
_LLAMA2: Shape = {
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_LLAMA3: Shape = {
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 |= {"num_key_value_heads": 8}
_ROPE3: Shape = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_ROPE3 |= {"original_max_position_embeddings": 8192}
_LLAMA32: Shape = {
    "head_dim": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {**_ROPE3, "factor": 32.0},
}
SHAPES: dict[str, Shape] = {
    "tiny": _shape({"vocab_size": 256}, 64, 128, 2, 4),
    "llama-1m": _shape(_SMALL, 128, 384, 2, 2),
    "llama-21m": _shape(_SMALL, 448, 1280, 8, 7),
    "llama-18m": _shape(_LLAMA2, 256, 768, 2, 4),
    "llama-300m": _shape(_LLAMA2, 1024, 2816, 24, 16, num_key_value_heads=8),
    "llama2-7b": _shape(_LLAMA2, 4096, 11_008, 32, 32),
    "llama2-13b": _shape(_LLAMA2, 5120, 13_824, 40, 40),
    "llama3.2-1b": _shape(_LLAMA3, 2048, 8192, 16, 32, **_LLAMA32),
    "llama3.1-8b": _shape(_LLAMA3, 4096, 14_336, 32, 32, rope_parameters={**_ROPE3, "factor": 8.0}),
}


def is_synthetic(location: object) -> bool:
    """Return whether a location names a synthetic model."""
    return str(location).startswith(_SYNTHETIC)


def synthetic_config(location: str | Path) -> LlamaConfig:
    """Return the config of `synthetic:<name>`. Raises UserError for an unknown name."""
    name = str(location).removeprefix(_SYNTHETIC)
    if name not in SHAPES:
        raise UserError(
            f"there is no synthetic model {location!r}; known:"
            f" {', '.join(_SYNTHETIC + known for known in SHAPES)}."
        )
    config = LlamaConfig(
        **SHAPES[name],
        dtype=torch.bfloat16,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config._commit_hash = f"{location}, random weights of seed {_SEED}"
    return config


def synthetic_model(
    location: str | Path, dtype: torch.dtype | str, device: str
) -> LlamaForCausalLM:
    """Return a Llama of the named shape on `device`, with random weights of a fixed seed."""
    config = synthetic_config(location)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(_SEED)
        return LlamaForCausalLM._from_config(
            config, dtype=config.dtype if dtype == "auto" else dtype
        )


def synthetic_tokenizer(location: str | Path) -> PreTrainedTokenizerFast:
    """Return a tokenizer that reads each number below the vocabulary's size as the token with that
    id, and anything else as 0.
    """
    vocabulary = {str(number): number for number in range(synthetic_config(location).vocab_size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
