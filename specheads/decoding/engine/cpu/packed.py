"""Packed copies of weights, with which a forward pass over few tokens costs hardly more than one
over one token.

A decoder layer as Llama's is one operator, and so is a head's network: small models spend more time
between operations than in them. Copies are shared by all engines of a model and made again when a
weight changes.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_made_of_tensors
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from specheads.decoding.engine.artefacts import COMPILING, is_hooked, warn_once
from specheads.decoding.engine.compiled_program import Weights
from specheads.decoding.engine.reading import RowsLayer
from specheads.heads.portable.network import Network, ResidualBlock
from specheads.load import available_memory
from specheads.pair.feature_draft import FeatureDraft
from specheads.pair.language_model import LanguageModel
from specheads.pair.quantization import on_lattice

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

logger = logging.getLogger(__name__)

_NUM_SAMPLED = 4096  # numbers of a weight that tell how it will be packed
# By the type in which they are packed
_LATTICES = {torch.uint8: ("Q4_1", "Q4_0"), torch.int8: ("Q8_0",)}
# That one of its weights takes, with its part of d and m
_BYTES = {torch.uint8: 0.625, torch.int8: 1.0625}
_TYPES = {torch.float32, torch.bfloat16}  # of weights that are packed
_SPARE_MEMORY = 0.8  # share of the available memory that copies may take

# Layers of transformers that compute x + o(attention(rotated(q(norm x)), ...)), then x +
# down(silu(gate(norm x)) * up(norm x)).
_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
# Of other layers, the maps that read the same input
_READ_TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def _storage(*weights: Tensor) -> torch.dtype:
    """Return the type in which weights are packed: one of fewer bits for those in float32 that lose
    nothing by it, or theirs.

    Checkpoints in 16 bits or fewer, as most are, run in float32 on processors without instructions
    for theirs, where one token takes as long as reading the weights does. Quantized ones become
    bytes, of two numbers each (uint8) or of one (int8).
    """
    dtype = weights[0].dtype
    if dtype != torch.float32:
        return dtype
    for storage, forms in _LATTICES.items():
        if all(on_lattice(weight, *forms) for weight in weights):
            return storage
    for narrow in (torch.bfloat16, torch.float16):
        if all(torch.equal(weight.to(narrow).float(), weight) for weight in weights):
            return narrow
    return dtype


def _pack(weight: Tensor, storage: torch.dtype | None = None) -> Tensor:
    """Return a weight (O, I) in panels, (ceil(O / P), I, P), with zeros in place of missing rows,
    in the type `storage`.

    In bfloat16, where the processor multiplies pairs of numbers and inputs are bfloat16, too, two
    neighbouring columns are stored as pairs, and I is even; elsewhere rows of a panel's two halves
    alternate, because such pairs become float32 in two instructions. Bytes are (ceil(O / P), I,
    bytes of a column): for each 32 columns d of the rows, m if q has 4 bits (else it is -128 d),
    then q, where a row's neighbouring columns are words of 32 bits.
    """
    rows = torch.ops.specheads.panel_rows()
    number = -(-weight.shape[0] // rows)
    size = weight.shape[1]
    if storage in _LATTICES:
        lattice = on_lattice(weight, *_LATTICES[storage])
        assert lattice is not None, "the weights are not on a lattice"
        q = lattice.q
        if storage == torch.uint8:
            q = q.view(torch.int16)
            q = (q | q >> 4).to(torch.uint8)
        scales = [lattice.d, lattice.m] if storage == torch.uint8 else [lattice.d]
        parts = [_in_panels(part, number * rows, rows) for part in (*scales, q.view(torch.int32))]
        return torch.cat(parts, dim=-1).view(number, size, -1).view(storage)
    in_pairs = weight.dtype == torch.bfloat16 and torch.ops.specheads.multiplies_pairs()
    weight = weight if storage is None else weight.to(storage)
    size += size % 2 if in_pairs else 0
    padded = weight.new_zeros(number * rows, size)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    if in_pairs:
        return (
            padded.reshape(number, rows, size // 2, 2).transpose(1, 2).reshape(number, size, rows)
        )
    if weight.dtype == torch.bfloat16:
        return (
            padded.reshape(number, 2, rows // 2, size)
            .permute(0, 3, 2, 1)
            .reshape(number, size, rows)
        )
    return padded.reshape(number, rows, size).transpose(1, 2).contiguous()


def _in_panels(x: Tensor, padded_rows: int, rows: int) -> Tensor:
    """Return numbers (O, groups, N) as bytes (panels, groups, those of N columns)."""
    padded = x.new_zeros(padded_rows, *x.shape[1:])
    padded[: len(x)] = x
    return (
        padded.view(-1, rows, *x.shape[1:])
        .permute(0, 2, 3, 1)
        .flatten(2)
        .contiguous()
        .view(torch.uint8)
    )


class _Packed(nn.Module):
    def __init__(self, **tensors: Tensor | None) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)


class _PackedLinear(_Packed):
    """Linear maps outside of such layers that read the same input, as one packed map."""

    def __init__(self, *members: nn.Linear) -> None:
        weights = [member.weight for member in members]
        bias = None if members[0].bias is None else torch.cat([member.bias for member in members])
        super().__init__(
            panels=_pack(
                torch.cat(weights) if len(weights) > 1 else weights[0], _storage(*weights)
            ),
            bias=bias,
        )
        self.sizes = [len(weight) for weight in weights]
        self._last: tuple[Tensor | None, Sequence[Tensor]] = (None, ())

    def compute(self, number: int, input_bits: int, linear: nn.Module, x: Tensor) -> Tensor:
        """Return the output (..., O) of one of the maps for `x` (..., I)."""
        if self._last[0] is not x:
            output = torch.ops.specheads.packed_linear(
                x, self.panels, self.bias, sum(self.sizes), input_bits
            )
            self._last = x, output.split(self.sizes, dim=-1) if len(self.sizes) > 1 else [output]
        of_member = self._last[1][number]
        if number == len(self.sizes) - 1:
            self._last = None, ()
        return of_member


def is_layer(module: nn.Module) -> bool:
    """Whether the operator `decoder_layer` computes what this module does."""
    kind = type(module)
    if kind.__name__ not in _LAYERS or not kind.__module__.startswith("transformers.models."):
        return False
    layer = cast("LlamaDecoderLayer", module)
    attention = layer.self_attn
    mlp = layer.mlp
    inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
    others = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    dtypes = {weight.dtype for weight in layer.parameters()}
    return (
        # No row needs padding
        all(type(each) is nn.Linear and each.in_features % 2 == 0 for each in (*inputs, *others))
        and len(dtypes) == 1
        # Such as quantized ones
        and not any(is_made_of_tensors(weight) for weight in layer.parameters())
        and dtypes <= _TYPES
        and len({each.bias is None for each in inputs}) == 1
        and all(each.bias is None for each in others)
        and type(mlp.act_fn) in (nn.SiLU, type(ACT2FN["silu"]))
        # Hooks of the layer itself see its inputs and outputs in any case.
        and not any(is_hooked(part) for part in layer.modules() if part is not layer)
    )


class _PackedLayer(_Packed):
    def __init__(self, layer: "LlamaDecoderLayer") -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
        output = attention.o_proj
        gate = mlp.gate_proj
        up = mlp.up_proj
        down = mlp.down_proj
        storage = _storage(*(each.weight for each in (*inputs, output, gate, up, down)))
        super().__init__(
            queries_keys_values=_pack(torch.cat([each.weight for each in inputs]), storage),
            bias=None if inputs[0].bias is None else torch.cat([each.bias for each in inputs]),
            output=_pack(output.weight, storage),
            gate_up=torch.stack(
                [_pack(gate.weight, storage), _pack(up.weight, storage)], dim=1
            ).flatten(0, 1),
            down=_pack(down.weight, storage),
        )

    def compute(
        self,
        number: int,
        input_bits: int,
        layer: "LlamaDecoderLayer",
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **options: object,
    ) -> Tensor:
        """Return the output (B, T, H) of the layer for hidden states (B, T, H)."""
        layers = () if past_key_values is None else past_key_values.layers
        memory = layers[layer.self_attn.layer_idx] if layers else None
        if attention_mask is None or memory is None or not memory.is_initialized:
            return type(layer).forward(
                layer,
                hidden,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                past_key_values=past_key_values,
                **options,
            )
        in_rows = isinstance(memory, RowsLayer)
        start_and_rows = (
            (memory.places.positions, memory.places.rows) if in_rows else (memory.start, None)
        )
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
            input_bits,
        )


def _is_network(module: nn.Module) -> bool:
    """Whether the operator `head_network` computes what this module does."""
    if not isinstance(module, Network):
        return False
    kind = type(module)
    if kind.score is not Network.score or kind.assemble is not Network.assemble:
        return False
    parts = list(module.modules())
    kinds = {type(part) for part in parts if part is not module}
    tensors = [*module.parameters(), *module.buffers()]
    return (
        kinds <= {ResidualBlock, nn.Linear, nn.Identity, nn.ModuleList}
        and not any(map(is_hooked, parts))
        and not any(map(is_made_of_tensors, tensors))  # such as quantized ones
        and {tensor.dtype for tensor in tensors} == {torch.float32}
    )


class PackedNetwork(_Packed):
    """A head's network as one operator."""

    def __init__(self, network: Network) -> None:
        projection = network.projection if isinstance(network.projection, nn.Linear) else None
        linears = [cast(ResidualBlock, block).linear for block in network.blocks]
        tensors = {
            "input_mean": network.input_mean,
            "input_scale": network.input_scale,
            "projection": None if projection is None else _pack(projection.weight),
            "projection_bias": None if projection is None else projection.bias,
            "blocks": torch.cat([_pack(linear.weight) for linear in linears]) if linears else None,
            "block_biases": torch.stack([linear.bias for linear in linears]) if linears else None,
            "readout": network.readout.weight[0],
            "readout_bias": network.readout.bias,
        }
        copies = dict[str, Tensor | None]()
        for name, tensor in tensors.items():
            copies[name] = None if tensor is None else tensor.detach().clone().contiguous()
        super().__init__(**copies)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the network's logits (...) for assembled inputs (..., input_size)."""
        return torch.ops.specheads.head_network(inputs, *self._buffers.values())


def _is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or is_made_of_tensors(module.weight):
        return False
    return module.weight.dtype in _TYPES


def _groups_of(model: nn.Module) -> list[list[nn.Module]]:
    """Return a model's layers, and linear maps outside of them, together if they read one input and
    all have a bias or none.
    """
    layers = [module for module in model.modules() if is_layer(module)]
    taken = set[nn.Module]()
    for layer in layers:
        taken.update(layer.modules())
    groups: dict[tuple[object, ...], list[nn.Module]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if child not in taken and _is_packable(child):
                taken.add(child)
                together = next((names for names in _READ_TOGETHER if name in names), name)
                groups.setdefault(
                    (parent, together, child.bias is None, child.weight.dtype), []
                ).append(child)
    return [*([layer] for layer in layers), *groups.values()]


# By the first of some modules, the weights that their copy was made of, and the copy.
_copies: WeakKeyDictionary[nn.Module, tuple[Weights, nn.Module]] = WeakKeyDictionary()


@torch.no_grad()
def _copy_of(group: Sequence[nn.Module]) -> Any:
    with COMPILING:
        return _made_copy_of(group)


def _made_copy_of(group: Sequence[nn.Module]) -> Any:
    if not _is_current(group):
        kind: Callable[..., nn.Module] = _PackedLinear
        if is_layer(group[0]):
            kind = _PackedLayer
        elif _is_network(group[0]):
            kind = PackedNetwork
        _copies[group[0]] = Weights(*group), kind(*group)
    return _copies[group[0]][1]


def _is_current(group: Sequence[nn.Module]) -> bool:
    kept = _copies.get(group[0])
    return kept is not None and kept[0].are_those_of(*group)


class PackedModel(nn.Module):
    """The packed copies for a step: `lm` computes with those of the model, `networks` are those of
    heads.
    """

    def __init__(
        self,
        lm: LanguageModel,
        groups: Sequence[Sequence[nn.Module]],
        networks: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        copies = [_copy_of(group) for group in groups]
        self.networks = {network: _copy_of([network]) for network in networks}
        self.copies = nn.ModuleList([*copies, *self.networks.values()])
        packed = {}
        for group, copied in zip(groups, copies, strict=True):
            for i, member in enumerate(group):
                packed[member] = partial(copied.compute, i, lm.input_bits)
        self.lm = copy.copy(lm)
        self.lm.model = _sharing(lm.model, packed, {})
        self.lm.input_embedding = self.lm.model.get_input_embeddings()
        self.lm.output_embedding = self.lm.model.get_output_embeddings()


def _sharing(
    module: nn.Module,
    packed: Mapping[nn.Module, Callable[..., Tensor]],
    made: dict[nn.Module, nn.Module],
) -> nn.Module:
    """Return a tree of modules with the tensors of `module` in which those that are `packed`
    compute with their copies.
    """
    if module not in made:
        new = made[module] = object.__new__(type(module))
        vars(new).update(vars(module))
        vars(new)["_modules"] = {}
        for name, child in module._modules.items():
            new._modules[name] = None if child is None else _sharing(child, packed, made)
        if module in packed:
            vars(new)["forward"] = partial(packed[module], new)
    return made[module]


def bytes_to_pack(lm: LanguageModel, networks: Sequence[nn.Module] = ()) -> int:
    """Return about how many bytes the packed copies take that a model and some networks do not have
    yet.
    """
    groups = [*_groups_of(lm.model), *([network] for network in networks)]
    num_bytes = 0
    for group in groups:
        if _is_current(group):
            continue
        for module in group:
            for weight in module.parameters():
                sampled_rows = -(-_NUM_SAMPLED * len(weight) // weight.numel())
                storage = _storage(weight[:sampled_rows])
                num_bytes += round(weight.numel() * _BYTES.get(storage, storage.itemsize))
    return num_bytes


def packed_model(lm: LanguageModel, others: Sequence[nn.Module]) -> PackedModel | None:
    """Return packed copies of a model on a CPU and of the networks in other modules, or None if
    memory is too small.
    """
    networks = list[nn.Module]()
    for other in others:
        networks += filter(_is_network, other.modules())
        if isinstance(other, FeatureDraft) and _is_packable(other.fc):
            networks.append(other.fc)
    groups = _groups_of(lm.model)
    needed = bytes_to_pack(lm, networks)
    if needed > _SPARE_MEMORY * available_memory():
        warn_once(
            "linear maps are not packed, and verification is slower: copies would take more than "
            f"{100 * _SPARE_MEMORY:.0f} % of the available memory"
        )
        return None
    if needed > 2**20:
        logger.info(
            "packing the linear maps of %s: %.0f MiB", type(lm.model).__name__, needed / 2**20
        )
    return PackedModel(lm, groups, networks)
