"""Packed copies of a model's linear maps, with which a forward pass over few tokens costs hardly more than one over one token.

A weight is copied once, into the order in which the operators of kernels/ read it; maps that read the same input (queries,
keys and values; gate and up) become one, and a decoder layer for which there is an operator is copied as a whole. Copies are
shared by all engines of a model and made anew when a weight changes.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_made_of_tensors

from specheads.decoding.engine import packed_head, packed_layer
from specheads.decoding.engine.operators import pack, packed_linear
from specheads.decoding.engine.packed_head import PackedNetwork
from specheads.decoding.engine.packed_layer import PackedLayer
from specheads.language_model import LanguageModel

logger = logging.getLogger(__name__)

MOST_TOKENS = 64  # with more, BLAS on the weights as they are is about as fast
SPARE_MEMORY = 0.8  # share of the available memory that copies may take


NUM_SAMPLED = 8  # numbers of each tensor that are compared, too: writing through `.data` changes neither place nor version


class Weights:
    """What the tensors of some modules held: where each is, how often it was written to, and some of its numbers on a CPU."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        tensors = _tensors_of(modules)
        self._places = [Place(tensor) for tensor in tensors]
        # Views, which see what is written later. On other devices a comparison would wait, and steps read weights in place.
        wide = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.itemsize > 1]
        plain = [each.detach() for each in wide if each.device.type == "cpu" and not is_made_of_tensors(each)]
        self._views = [each.flatten()[:: max(1, each.numel() // NUM_SAMPLED)] for each in plain if each.is_contiguous()]
        self._sample = self._now()

    def are_those_of(self, modules: Sequence[nn.Module]) -> bool:
        """Whether the modules have the same tensors, unchanged."""
        return [Place(tensor) for tensor in _tensors_of(modules)] == self._places and torch.equal(self._now(), self._sample)

    @torch.no_grad()
    def _now(self) -> Tensor:
        """Return the sampled numbers as bytes: NaN equals itself."""
        return torch.cat([torch.zeros(0), *self._views]).view(torch.uint8)


def _tensors_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


class Place:
    """Where a tensor is and how often it was written to."""

    def __init__(self, tensor: Tensor) -> None:
        # The tensor is held, so that no other one can take its place in memory.
        self.tensor = tensor
        self._where: tuple[Any, ...] = tensor.dtype, 0 if tensor.is_inference() else tensor._version
        if is_made_of_tensors(tensor):  # it has no address, and a module that is moved may exchange what it is made of
            self._where += tuple(Place(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        else:
            self._where += (tensor.data_ptr(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.tensor is other.tensor and self._where == other._where

    __hash__ = None  # type: ignore[assignment]


class PackedLinear(nn.Module):
    """Linear maps that read the same input, as one packed map."""

    panels: Tensor
    bias: Tensor | None

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        super().__init__()
        weights = [member.weight for member in members]
        self.sizes = [len(weight) for weight in weights]
        self.register_buffer("panels", pack(torch.cat(weights) if len(weights) > 1 else weights[0]), persistent=False)
        bias = None if members[0].bias is None else torch.cat([member.bias for member in members])
        self.register_buffer("bias", bias, persistent=False)
        self._last: tuple[Tensor | None, Sequence[Tensor]] = (None, ())

    def forward_of(self, members: Sequence[nn.Module], number: int) -> Callable[[Tensor], Tensor]:
        """Return what computes the map of this number."""
        return partial(self.output, number)

    def output(self, number: int, x: Tensor) -> Tensor:
        """Return the output (..., O) of one of the maps for `x` (..., I)."""
        if len(self.sizes) == 1:
            return packed_linear(x, self.panels, self.bias, self.sizes[0])
        if self._last[0] is not x:
            self._last = x, packed_linear(x, self.panels, self.bias, sum(self.sizes)).split(self.sizes, dim=-1)
        output = self._last[1][number]
        if number == len(self.sizes) - 1:
            self._last = None, ()
        return output


# By the first member, the weights that it was made of, and the copy.
_copies: WeakKeyDictionary[nn.Module, tuple[Weights, PackedLinear | PackedLayer | PackedNetwork]] = WeakKeyDictionary()


class PackedModel(nn.Module):
    """The packed copies of groups of modules: linear maps that read the same input, one decoder layer, or a head's network."""

    def __init__(self, groups: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()
        self._groups = [(group, _copy_of(group)) for group in groups]
        self.copies = nn.ModuleList([copied for _, copied in self._groups])

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """While it is active, the modules compute with their packed copies."""
        for group, copied in self._groups:
            for number, member in enumerate(group):
                member.forward = copied.forward_of(group, number)
        try:
            yield
        finally:
            for group, _ in self._groups:
                for member in group:
                    del member.forward


def packed_model(lm: LanguageModel, others: Sequence[nn.Module]) -> PackedModel | None:
    """Return packed copies of the linear maps of a model on a CPU and of other modules, or None if memory is too small."""
    layers = [module for module in lm.model.modules() if packed_layer.has_operator(module)]
    networks = [module for other in others for module in other.modules() if packed_head.has_operator(module)]
    linears = [module for other in others for module in other.modules() if _is_packable(module)]
    groups: list[Sequence[nn.Module]] = [[module] for module in (*layers, *networks)]
    groups += _linear_groups(lm, within=layers)
    groups += [[module] for module in linears if not any(module in network.modules() for network in networks)]
    new = [member for group in groups if not _is_current(group) for member in group]
    needed = sum(weight.nbytes for member in new for weight in member.parameters())
    available = available_memory()
    if needed > SPARE_MEMORY * available:
        _warn_of_memory(needed, available)
        return None
    if needed > 2**20:
        logger.info("packing the linear maps of %s: %.0f MiB", type(lm.model).__name__, needed / 2**20)
    return PackedModel(groups)


def available_memory() -> float:
    """Return the bytes of memory that this process may still take; infinity where that cannot be told."""
    limits = [float("inf")]
    information = Path("/proc/meminfo")
    if information.is_file():
        fields = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    elif hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    most, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if most.is_file() and used.is_file() and most.read_text().strip() != "max":
        limits.append(int(most.read_text()) - int(used.read_text()))
    return min(limits)


def _copy_of(group: Sequence[nn.Module]) -> PackedLinear | PackedLayer | PackedNetwork:
    if not _is_current(group):
        with torch.no_grad():
            linears = [module for module in group if _is_packable(module)]
            of_head = packed_head.has_operator(group[0])
            copied = PackedLinear(linears) if linears else PackedNetwork(group) if of_head else PackedLayer(group)
            _copies[group[0]] = Weights(group), copied
    return _copies[group[0]][1]


def _is_current(group: Sequence[nn.Module]) -> bool:
    kept = _copies.get(group[0])
    return kept is not None and kept[0].are_those_of(group)


def _is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or is_made_of_tensors(module.weight):
        return False
    return module.weight.dtype.is_floating_point and module.weight.dtype.itemsize > 1


@torch.no_grad()
def _linear_groups(lm: LanguageModel, within: Sequence[nn.Module]) -> list[list[nn.Linear]]:
    """Return the linear maps outside of some layers, those together that read the same tensor and all have a bias or none."""
    inputs: list[Tensor] = []  # kept, so that no tensor takes the place of another
    groups: dict[tuple[int, bool, torch.dtype], list[nn.Linear]] = {}

    def note(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])
        members = groups.setdefault((id(args[0]), module.bias is None, module.weight.dtype), [])
        if module not in members:
            members.append(module)

    inside = {module for layer in within for module in layer.modules()}
    linears = [module for module in lm.model.modules() if _is_packable(module) and module not in inside]
    handles = [module.register_forward_pre_hook(note) for module in linears]
    try:
        lm.logits(lm.hidden_states(torch.zeros((1, 1), dtype=torch.long, device=lm.device), use_cache=False))
    finally:
        for handle in handles:
            handle.remove()
    return list(groups.values())


_has_warned = False  # every step of every engine asks, and one warning is enough


def _warn_of_memory(needed: float, available: float) -> None:
    global _has_warned
    if not _has_warned:
        logger.warning(
            "linear maps are not packed, and verification is slower: packed copies need %.0f MiB, and of %.0f MiB of available "
            "memory at most %.0f %% are taken",
            needed / 2**20,
            available / 2**20,
            SPARE_MEMORY * 100,
        )
    _has_warned = True
