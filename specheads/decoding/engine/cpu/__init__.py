"""Operations of steps on a CPU, in C++: engines are given `CpuStep`, and know nothing else of this folder."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specheads.decoding.engine.compiled import StepOperations
from specheads.decoding.engine.cpu.library import declarations, load_operators, native_call
from specheads.decoding.engine.cpu.packed import PackedModel, has_packed_layers, packed_model
from specheads.decoding.engine.reading import RowPlaces, has_other_options
from specheads.pair.language_model import LanguageModel
from specheads.pair.sampling import Operations


class CpuStep(StepOperations):
    """The operations of one step: packed copies of weights over few tokens, and attention that reads rows where they lie."""

    def __init__(self, lm: LanguageModel, modules: Sequence[nn.Module], few: bool, rows: bool) -> None:
        super().__init__(lm, modules, few, rows)
        self.packed: PackedModel | None = None
        self.has_operators = (few or rows) and load_operators()
        if not self.has_operators:
            return
        self.packed = packed_model(lm, modules) if few else None
        self.lm = lm if self.packed is None else self.packed.lm
        self.native = native_call
        self.reads_all_rows = rows and lm.config._attn_implementation == "sdpa"
        self.compiler_options = {"aot_inductor.custom_ops_to_c_shims": declarations()}
        panels = () if self.packed is None else self.packed.copies.buffers()
        self.name = ("cpu", self.packed is not None, *sorted({str(each.dtype) for each in panels}))

    @classmethod
    def reader(cls, lm: LanguageModel) -> LanguageModel:
        return packed_reader(lm)

    @classmethod
    def reads_rows_in_place(cls, lm: LanguageModel) -> bool:
        return lm.config._attn_implementation == "sdpa" and load_operators()

    def operations(self, places: RowPlaces | None) -> Operations:
        if not self.has_operators:
            return Operations()
        return CpuOperations({} if self.packed is None else self.packed.networks, places if self.reads_all_rows else None)


def packed_reader(lm: LanguageModel) -> LanguageModel:
    """Return a model that reads on packed copies, as steps do, if all its layers have them and products gain by them."""
    is_right = lm.device.type == "cpu" and lm.output_embedding.weight.dtype == torch.float32  # 16 bits gain nothing
    if not is_right or lm.config._attn_implementation != "sdpa" or not has_packed_layers(lm.model) or not load_operators():
        return lm
    if (packed := packed_model(lm, ())) is None:
        return lm
    packed.lm.explicit_masks = True
    return packed.lm


class CpuOperations(Operations):
    """What C++ computes of a forward pass, a warp and a head, on packed copies by network.

    `places` are those of the tokens, where keys and values are those of all rows of a memory; `in_bulk`: whether many
    distributions are warped at once, uncompiled, in code of its own.
    """

    def __init__(
        self, networks: Mapping[nn.Module, Any] | None = None, places: RowPlaces | None = None, in_bulk: bool = False
    ) -> None:
        self._networks, self._places, self._in_bulk = networks or {}, places, in_bulk

    def most_likely(self, x: Tensor) -> Tensor:
        return torch.ops.specheads.most_likely(x)

    def kth_largest(self, x: Tensor, k: int) -> Tensor:
        return torch.ops.specheads.kth_largest(x, k)

    def token_at(self, probs: Tensor, uniform: Tensor) -> Tensor:
        return torch.ops.specheads.token_at(probs, uniform)

    @property
    def _may_round(self) -> bool:
        """Compiled code rounds sums in another order anyway; what runs uncompiled keeps its bits."""
        return self._in_bulk or torch.compiler.is_compiling()

    def kept_softmax(self, logits: Tensor, least: Tensor) -> Tensor:
        return torch.ops.specheads.kept_softmax(logits, least) if self._may_round else super().kept_softmax(logits, least)

    def nucleus(self, probs: Tensor, top_p: float) -> Tensor:
        return torch.ops.specheads.nucleus(probs, top_p) if self._may_round else super().nucleus(probs, top_p)

    def head_logits(self, network: Any, features: Mapping[str, Tensor]) -> Tensor:
        copied = self._networks.get(network)
        return super().head_logits(network, features) if copied is None else copied.logits(network.assemble(features))

    def attention(
        self, plain: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        places = self._places
        if mask is None or has_other_options(options):
            key, value = (key, value) if places is None else (key[places.rows], value[places.rows])
            return plain(module, query, key, value, mask, **options)
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        of_rows = (None, None) if places is None else places
        return torch.ops.specheads.masked_attention(query, key, value, mask, *of_rows, scale), None


def bulk_operations(device: torch.device) -> Operations:
    """Return what to compute with where a device warps many distributions at once, uncompiled."""
    return CpuOperations(in_bulk=True) if device.type == "cpu" and load_operators() else Operations()
