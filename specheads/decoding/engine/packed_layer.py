"""Packed copies of whole decoder layers, each computed by one operator, where the layer is built as Llama's are.

A small model spends more time between operations than in them. Layers of other kinds are packed map by map; see packed.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_made_of_tensors
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from specheads.decoding.engine.operators import pack
from specheads.decoding.engine.row_reading import RowsLayer

# Layers of transformers that compute x + o(attention(rotated(q(norm x)), ...)), then x + down(silu(gate(norm x)) * up(norm x)).
KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")


def has_operator(module: nn.Module) -> bool:
    """Whether the operator computes what this module does."""
    kind = type(module)
    if kind.__name__ not in KINDS or not kind.__module__.startswith("transformers.models."):
        return False
    layer: Any = module
    attention, mlp = layer.self_attn, layer.mlp
    inputs, others = (attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj, *_maps_of(mlp))
    dtypes = {weight.dtype for weight in layer.parameters()}
    return (
        all(type(each) is nn.Linear and each.in_features % 2 == 0 for each in (*inputs, *others))  # no row needs padding
        and len(dtypes) == 1
        and not any(is_made_of_tensors(weight) for weight in layer.parameters())  # such as quantized ones
        and all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes)
        and len({each.bias is None for each in inputs}) == 1
        and all(each.bias is None for each in others)
        and type(mlp.act_fn) in (nn.SiLU, type(ACT2FN["silu"]))
        and not any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules())
    )


def _maps_of(mlp: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj


class PackedLayer(nn.Module):
    """One decoder layer whose maps are packed for the operator."""

    bias: Tensor | None

    def __init__(self, members: Sequence[Any]) -> None:
        super().__init__()
        (layer,) = members
        attention, (gate, up, down) = layer.self_attn, _maps_of(layer.mlp)
        inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.register_buffer("queries_keys_values", pack(torch.cat([each.weight for each in inputs])), persistent=False)
        bias = None if inputs[0].bias is None else torch.cat([each.bias for each in inputs])
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("output", pack(attention.o_proj.weight), persistent=False)
        gate_up = torch.stack([pack(gate.weight), pack(up.weight)], dim=1).flatten(0, 1)
        self.register_buffer("gate_up", gate_up, persistent=False)
        self.register_buffer("down", pack(down.weight), persistent=False)

    def forward_of(self, members: Sequence[nn.Module], number: int) -> Callable[..., Tensor]:
        """Return what computes the layer on hidden states (B, T, H)."""
        return partial(self._output, members[number])  # not kept here: copies go when their layer goes

    def _output(
        self,
        layer: Any,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **options: Any,
    ) -> Tensor:
        if attention_mask is None or position_embeddings is None or past_key_values is None:  # not a step on static memory
            names = {
                "attention_mask": attention_mask,
                "position_embeddings": position_embeddings,
                "past_key_values": past_key_values,
            }
            return type(layer).forward(layer, hidden, **names, **options)
        memory: Any = past_key_values.layers[layer.self_attn.layer_idx]
        in_rows = isinstance(memory, RowsLayer)
        start_and_rows = (memory.places.positions, memory.places.rows) if in_rows else (memory.start, None)
        return torch.ops.specheads.decoder_layer(
            hidden,
            *position_embeddings,
            attention_mask,
            *start_and_rows,
            memory.keys,
            memory.values,
            layer.input_layernorm.weight,
            self.queries_keys_values,
            self.bias,
            self.output,
            layer.post_attention_layernorm.weight,
            self.gate_up,
            self.down,
            layer.input_layernorm.variance_epsilon,
            layer.self_attn.scaling,
        )
