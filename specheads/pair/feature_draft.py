"""EAGLE-3's draft (Li et al. 2025, arXiv 2503.01840): one decoder layer that reads its target.

It reads pairs of a state and a token: the state at position t and the token at t + 1 predict the
token at t + 2. Where the target has read position t, the state is made of its features, the inputs
of some of its layers; later steps of a draft read the state that the step before has returned. A
KV cache may hold entries of both kinds. Those of own states are dropped after a verification.

While it decodes, a layer of the KV cache carries the states: the target's steps write those of the
positions that they read, and each step of the draft the one after its last token.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from specheads.pair.language_model import LanguageModel, check_numbers
from specheads.pair.sampling import active


class _Parts(NamedTuple):
    """The modules of an architecture that a draft's layer is made of."""

    layer: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


_PARTS = {
    "llama": _Parts(LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": _Parts(Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}
ARCHITECTURES = tuple(_PARTS)  # of the layer
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # keys of a config
CARRIER = 1  # the layer of a KV cache that carries states; layer 0 is that of the attention


def usual_layers(count: int) -> tuple[int, ...]:
    """Return the layers of a target of `count` layers whose inputs a draft reads by default, as
    SafeAILab's implementation, vLLM and SGLang take them.
    """
    return 2, count // 2, count - 3


class FeatureDraftConfig(PreTrainedConfig):
    """The sizes and norms of a draft that reads its target.

    `text_config` is that of a model with one such layer. `norm_before_fc` and `fc_norm` exclude
    each other. `norm_output` with `fc_norm` is EAGLE-3.1 (arXiv 2605.09992).
    """

    model_type = "feature_draft"
    sub_configs: ClassVar[dict[str, type]] = {"text_config": AutoConfig}

    text_config: Any = None
    target_layers: tuple[int, ...] = ()  # whose inputs the draft reads, from low to high
    target_hidden_size: int = 0
    draft_vocab_size: int = 0
    norm_before_residual: bool = False  # whether the layer adds to the normalized state
    norm_before_fc: bool = False  # one norm over all features
    fc_norm: bool = False  # a norm for the features of each layer
    norm_output: bool = False  # whether own states are normalized

    def __post_init__(self, **kwargs: object) -> None:
        if isinstance(self.text_config, Mapping):
            self.text_config = AutoConfig.for_model(**self.text_config)
        super().__post_init__(**kwargs)


class FeatureDraftOutput(NamedTuple):
    """What a step returns, (B, T, H) each."""

    hidden: Tensor  # what the output embedding and heads read
    state: Tensor  # what the next step reads


class _FeatureLayer(GradientCheckpointingLayer):
    """A decoder layer whose attention reads a token's embedding next to a state."""

    def __init__(self, config: FeatureDraftConfig) -> None:
        super().__init__()
        text_config = config.text_config
        size = text_config.hidden_size
        parts = _PARTS[text_config.model_type]
        plain: Any = parts.layer(text_config, layer_idx=0)
        self.input_layernorm = plain.input_layernorm
        self.hidden_norm = parts.norm(size, eps=text_config.rms_norm_eps)
        self.self_attn = plain.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(plain.self_attn, name)
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(plain.self_attn, name, wide)
        self.post_attention_layernorm = plain.post_attention_layernorm
        self.mlp = plain.mlp
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        attend: Callable[..., tuple[Tensor, Any]] | None = None,
        **attention: object,
    ) -> tuple[Tensor, Any]:
        """Return the layer's output (B, T, H) for embeddings and states (B, T, H), and what its
        attention returns besides; `attend` computes in place of that.
        """
        normalized = self.hidden_norm(states)
        both = torch.cat([self.input_layernorm(embeddings), normalized], dim=-1)
        attended, more = (attend or self.self_attn)(both, **attention)
        hidden = attended + (normalized if self.norm_before_residual else states)
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), more


class FeatureDraft(PreTrainedModel):
    """A draft that reads its target. Its modules have the names of speculators' tensors."""

    config_class = FeatureDraftConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: FeatureDraftConfig) -> None:
        super().__init__(config)
        text_config = config.text_config
        text_config._attn_implementation = config._attn_implementation
        size = text_config.hidden_size
        count = len(config.target_layers)
        parts = _PARTS[text_config.model_type]

        def norm(width: int) -> nn.Module:
            return parts.norm(width, eps=text_config.rms_norm_eps)

        width = config.target_hidden_size
        self.embed_tokens = nn.Embedding(text_config.vocab_size, size)
        self.input_norm = norm(count * width) if config.norm_before_fc else None
        norms = [norm(width) for _ in range(count)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(count * width, size, bias=False)
        self.layers = nn.ModuleList([_FeatureLayer(config)])
        self.norm = norm(size)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary_emb = parts.rotary(text_config)
        self.post_init()

    @property
    def described(self) -> str:
        """What it is and reads, in words: wrong layers or norms fail nowhere."""
        config = self.config
        norms = [norm for norm in NORMS if getattr(config, norm)]
        return (
            f"a {config.text_config.model_type} layer that reads the inputs of layers"
            f" {', '.join(map(str, config.target_layers))} of the target"
            f" ({', '.join(norms) or 'no norms of choice'})"
        )

    def first_states(self, features: Tensor) -> Tensor:
        """Return the states (B, T, H) that a first step reads, of the target's features (B, T, L
        H_target): the inputs of L layers next to each other.
        """
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            normalized = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            features = torch.cat(normalized, dim=-1)
        return active().linear(self.fc, features)

    def forward(
        self,
        input_ids: Tensor,
        states: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> FeatureDraftOutput:
        """Read the tokens `input_ids` (B, T) long, each with the state (B, T, H) one position
        before it.

        Args:
            states: `first_states`, or the states that the step before returned; default: those
                that the KV cache carries, which also takes the last one that this step returns.
            position_ids: (B, T) long; default: the next ones.
            attention_mask: (B, S), 0 at padding, or (B, 1, T, S) as attention takes it; default:
                causal.
            past_key_values: the KV cache, which grows by T entries.
        """
        embeddings = self.embed_tokens(input_ids)
        carrier: Any = None
        if states is None:
            assert past_key_values is not None, "states are given, or lie in a KV cache"
            carrier = past_key_values.layers[CARRIER]
            states = carrier.carried(embeddings)
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = past + torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        mask = create_causal_mask(
            config=self.config.text_config,
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        out, _ = self.layers[0](
            embeddings,
            states,
            position_embeddings=self.rotary_emb(embeddings, position_ids=position_ids),
            attention_mask=mask,
            past_key_values=past_key_values,
        )
        hidden = self.norm(out)
        state = hidden if self.config.norm_output else out
        if carrier is not None:
            carrier.carry(state)
        return FeatureDraftOutput(hidden, state)


class FeatureLM(LanguageModel):
    """A draft that reads its target, in two steps: tokens next to states -> hidden states ->
    logits.
    """

    def __init__(
        self, model: FeatureDraft, vocab_size: int | None = None, temperature: float = 1.0
    ) -> None:
        super().__init__(model, vocab_size, temperature)
        self.reads_layers = model.config.target_layers
        self.num_skipped = 1  # the token at a position is the one after its state

    @property
    def cache_layers(self) -> int:
        return CARRIER + 1

    def hidden_states(self, tokens: Tensor, **kwargs: object) -> Tensor:
        """Return the hidden states (B, T, H) for `tokens` (B, T) after the first of a text, next to
        the states that a KV cache carries.
        """
        kwargs.pop("use_cache", None)  # there is always a cache
        hidden: Tensor = self.model(tokens, **kwargs).hidden
        return hidden

    @property
    def body(self) -> nn.Module:
        return self.model

    @torch.no_grad()
    def check(self) -> None:
        """Raise UserError unless its logits are numbers."""
        tokens = torch.arange(4, device=self.device)[None] % self.vocab_size
        draft: Any = self.model
        features = draft.fc.weight.new_ones(1, 4, draft.fc.in_features)
        logits = draft.lm_head(draft(tokens, draft.first_states(features)).hidden)
        check_numbers(draft, logits)
