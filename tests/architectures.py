"""Tiny random models of every causal architecture that the installed transformers has, in float64,
and pairs of them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from families import VOCAB_SIZE, noisy_pair
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specheads.pair.pair import Pair

WINDOW = 12
LENGTH = 160
MOST_WEIGHTS = 2e7  # of a model that is made; larger ones have sizes that are not shrunk here


# Sizes, and their names in configs; a name that a config does not have, or leaves out, stays out.
_NAMES = {
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input",
    LENGTH: "max_position_embeddings seq_length n_positions n_ctx max_seq_len context_length"
    " original_max_position_embeddings",
    WINDOW: "sliding_window attention_chunk_size attention_window_size window_size local_attention"
    " keep_window_size index_topk",
    64: "mamba_d_ssm",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff n_inner d_inner"
    " ffn_hidden_size",
    32: "hidden_size d_model n_embd dim embedding_dim attention_hidden_size word_embed_proj_dim"
    " embedding_size lru_width",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank"
    " kv_lora_rank",
    8: "attention_head_size head_dim v_head_dim linear_key_head_dim linear_value_head_dim"
    " index_head_dim mamba_n_heads mamba_d_head mamba_d_state mamba_num_heads mamba_head_dim"
    " mamba_chunk_size chunk_size ssm_state_size state_size hidden_size_per_layer_input"
    " query_pre_attn_scalar",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads"
    " encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts"
    " qk_rope_head_dim qk_nope_head_dim linear_num_value_heads mamba_dt_rank time_step_rank"
    " mamba_d_conv",
    2: "num_key_value_heads num_experts_per_tok moe_topk linear_num_key_heads index_n_heads"
    " mamba_expand n_mamba_heads num_blocks type_vocab_size decoder_layers num_decoder_layers",
    1: "n_group topk_group first_k_dense_replace n_groups max_window_layers n_shared_experts"
    " zero_expert_num encoder_layers",
    None: "bos_token_id eos_token_id pad_token_id",
    0: "num_kv_shared_layers",
    5.0: "final_logit_softcapping",
    4.5: "logits_scaling",
    0.25: "logit_scale",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Latent attention: all heads have keys, of which a part is rotated.
_LATENT = {"head_dim": 4, "num_key_value_heads": 4}
_PADDED = {"pad_token_id": 0}
_ENDED = {"bos_token_id": 1, "eos_token_id": 2}
_ZAMBA = {
    "layer_types": ["mamba", "hybrid"] * 2,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}
# Whose own code fails in float64.
_DTYPES = dict.fromkeys(("inkling2_text", "xglm", "xlnet"), torch.float32)
# Further choices, by names of architectures.
_CHOICES = {
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash"
    " minicpm3 youtu": _LATENT,
    "camembert data2vec-text prophetnet roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl"
    " gemma4_text gemma4_unified_text": _PADDED,
    "codegen gptj": {"rotary_dim": 8},
    "hunyuan_v1_dense hunyuan_v1_moe ministral": {"head_dim": 8},
    "lfm2 lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "num_experts_per_token": 2},
    "bamba": {"attn_layer_indices": [1]},
    "cwm": _ENDED,
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4},
    },
    "kimi_linear": _LATENT
    | {"num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "ernie4_5_moe": {"moe_k": 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "emu3_text_model mllama_text_model modernbert-decoder": _ENDED | _PADDED,
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_shape": (16, 10), "axial_pos_embds_dim": (16, 16), "num_buckets": 4},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "xlm": {"emb_dim": 32, "pad_token_id": 2},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA | {"hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
_OTHERS = {name: choices for names, choices in _CHOICES.items() for name in names.split()}


def _kinds(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def tiny_config(name: str, least_layers: int = 2, **more: Any) -> PretrainedConfig:
    """Return a tiny config with as many layers as it needs to have every kind of them.

    Its parts are tiny, too.
    """
    return _shrunk(CONFIG_MAPPING[name], name, more, least_layers)


def _shrunk(
    make: Callable[..., PretrainedConfig],
    name: str,
    more: Mapping[str, Any],
    least_layers: int = 2,
) -> PretrainedConfig:
    usual = make()
    known = usual.to_dict()
    optional = {
        "sliding_window",
        "final_logit_softcapping",
        "q_lora_rank",
        "head_dim",
        "logit_scale",
    }
    sizes = {
        key: value
        for key, value in _SIZES.items()
        if key in known and not (known[key] is None and key in optional)
    }
    for key, part in vars(usual).items():
        if isinstance(part, PretrainedConfig):
            sizes[key] = _shrunk(type(part), part.model_type, {}).to_dict()
    sizes |= ({"is_decoder": True} if "is_decoder" in known else {}) | _OTHERS.get(name, {}) | more
    if "layer_types" in sizes:
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    for number in range(least_layers, 10, 2):
        layers = (
            {key: number for key in _LAYERS if key in known} if "layer_types" not in sizes else {}
        )
        config = make(**sizes | layers)
        if _kinds(config) >= _kinds(usual):
            break
    return config


def tiny_model(config: PretrainedConfig, seed: int, gain: float = 2.0) -> PreTrainedModel:
    """Return a random model whose greedy text does not repeat itself at once.

    MemoryError if it is not tiny.
    """
    # The other implementations of experts lack float64.
    options = {
        "dtype": _DTYPES.get(config.model_type, torch.float64),
        "experts_implementation": "eager",
    }
    with torch.device("meta"):
        number = sum(
            weight.numel()
            for weight in AutoModelForCausalLM.from_config(config, **options).parameters()
        )
    if number > MOST_WEIGHTS:
        raise MemoryError(f"{number / 1e6:.1f} M weights")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **options).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:
            torch.nn.init.normal_(
                weight, std=0.3 if "embed" in name else gain / weight.shape[1:].numel() ** 0.5
            )
    return model


def tiny_pair(name: str, **more: Any) -> Pair:
    """Return a pair of one architecture.

    The draft is the target with noise, so that it is often right and often wrong.
    """
    target, draft = (tiny_model(tiny_config(name, **more), seed=4) for _ in range(2))
    return noisy_pair(name, target, draft)
