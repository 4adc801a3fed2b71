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

_SYNTHETIC = "synthetic:"  # how a config names them, `synthetic:llama3.1-8b`
_SEED = 0
Shape = dict[str, object]  # arguments of LlamaConfig


_LLAMA3: Shape = {
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
_ROPE3: Shape = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, Shape] = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "llama3.2-1b": {
        **_LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {**_ROPE3, "factor": 32.0},
    },
    "llama3.1-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "rope_parameters": {**_ROPE3, "factor": 8.0},
    },
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
