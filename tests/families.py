"""A tiny random model of every supported family, in float64, and pairs of them."""

import pytest
import torch
from fakes import CountingTokenizer, cut
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from specheads.pair.pair import Pair

VOCAB_SIZE = 29
WINDOW = 160
_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SHAPE |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": WINDOW}
_SHAPE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
_OPT = {**_SHAPE, "ffn_dim": 48, "dropout": 0.0}
CONFIGS = {
    "llama": LlamaConfig(**_GROUPED, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_GROUPED, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_GROUPED, tie_word_embeddings=True),
    # The window slides over every other layer, and is passed within a few tokens.
    "gemma2": Gemma2Config(
        **_GROUPED,
        sliding_window=12,
        query_pre_attn_scalar=8,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=3.0,
    ),
    "opt": OPTConfig(**_OPT, word_embed_proj_dim=32),
    "opt-350m": OPTConfig(**_OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
    "bloom": BloomConfig(
        **{k: v for k, v in _SHAPE.items() if k != "max_position_embeddings"}, seq_length=WINDOW
    ),
    "gpt-neox": GPTNeoXConfig(**_SHAPE, intermediate_size=48, tie_word_embeddings=False),
}


def tiny_model(config: PretrainedConfig, seed: int, gain: float = 2.0):
    """Return a random model whose greedy text does not repeat itself at once.

    With a `gain` of 1 a linear map keeps the size of what it reads, and rounding is amplified far
    less.
    """
    torch.manual_seed(seed)
    model = (
        AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval().requires_grad_(False)
    )
    scale = getattr(model.get_input_embeddings(), "embed_scale", None)
    if scale is not None:
        # Float32 as in a model that is loaded; the compiler has no place for a float64 number.
        model.get_input_embeddings().embed_scale = scale.float()
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(
                weight, std=0.3 if "embed" in name else gain / weight.shape[1] ** 0.5
            )
        # Norms of both signs, or a tied embedding would predict its own token.
        elif name.endswith("weight"):
            torch.nn.init.normal_(weight)
    return model


CUT = "llama, cut"  # a pair whose draft has an output over every other token


def family_pair(name: str) -> Pair:
    """Return a pair of one family.

    The draft is the target with noise, so that it is often right and often wrong.
    """
    if name == CUT:
        return cut(family_pair("llama"), range(0, VOCAB_SIZE, 2))
    target, draft = (tiny_model(CONFIGS[name], seed=4) for _ in range(2))
    return noisy_pair(name, target, draft)


def noisy_pair(name: str, target: PreTrainedModel, draft: PreTrainedModel) -> Pair:
    """Return a pair of two equal models, of which noise is added to the draft."""
    torch.manual_seed(2)
    for weight in draft.parameters():
        if weight.is_floating_point():
            weight += 0.05 * weight.abs().mean() * torch.randn_like(weight)
    roles = (f"{name}-target", "r1", f"{name}-draft", "r2")
    return Pair(target, draft, CountingTokenizer(VOCAB_SIZE), name, *roles)


def families_compiled(*always: str) -> list:
    """Return the families as parameters of a test of compiled steps, which takes half a minute
    each.

    Only those of `always` are compiled in every run.
    """
    return [
        name if name in always else pytest.param(name, marks=pytest.mark.full) for name in CONFIGS
    ]
