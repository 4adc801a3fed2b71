"""The operators of kernels/ as `torch.ops.specheads`, built by the first process that needs them on a machine."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specheads import sampling
from specheads.decoding.engine.compile_plan import Plan, load_compiler_during
from specheads.decoding.engine.grouped_attention import OTHER_ATTENTION, replaced_sdpa
from specheads.decoding.engine.kernel_build import build, library_path, load_library
from specheads.decoding.engine.row_reading import RowPlaces

logger = logging.getLogger(__name__)

# Functions of sampling.py that an operator of the same name computes: with the same result, or with another rounding.
SAME_SAMPLING, ROUNDED_SAMPLING = ("kth_largest", "most_likely", "token_at"), ("kept_softmax", "nucleus")
OPERATORS = ("packed_linear", "masked_attention", "decoder_layer", "head_network", *SAME_SAMPLING, *ROUNDED_SAMPLING)
C_TYPES = {"Tensor": "AtenTensorHandle", "Optional[Tensor]": "AtenTensorHandle*", "int": "int64_t", "float": "double"}


@cache
def load_operators() -> bool:
    """Build or load the operators; return whether they can be used, and say why not."""
    start = time.perf_counter()
    try:
        path = library_path()
        if Plan.active is not None and not path.exists():
            load_compiler_during(partial(build, path))
        load_library(path)  # compiled steps call the operators by symbol
    except (RuntimeError, OSError, AssertionError) as error:
        reason = next(iter(str(error).splitlines()), "")
        logger.warning("verification is slower than it could be, because its operators cannot be built: %s", reason)
        return False
    torch.library.register_fake("specheads::packed_linear", _shape_of_linear)
    torch.library.register_fake("specheads::masked_attention", _shape_of_attention)
    torch.library.register_fake("specheads::decoder_layer", lambda hidden, *others: torch.empty_like(hidden))
    torch.library.register_fake("specheads::head_network", lambda inputs, *others: inputs.new_empty(inputs.shape[:-1]))
    torch.library.register_fake("specheads::kth_largest", lambda x, k: x.new_empty(*x.shape[:-1], 1))
    torch.library.register_fake("specheads::kept_softmax", lambda logits, least: torch.empty_like(logits))
    torch.library.register_fake("specheads::nucleus", lambda probs, top_p: torch.empty_like(probs))
    torch.library.register_fake("specheads::most_likely", lambda x: x.new_empty(x.shape[:-1], dtype=torch.long))
    torch.library.register_fake("specheads::token_at", lambda probs, uniform: torch.empty_like(uniform, dtype=torch.long))
    logger.info("built or loaded the operators in %.1f s", time.perf_counter() - start)
    return True


class Declarations(dict[str, list[str]]):
    """The C functions by which compiled steps call operators, in place of a look-up by name; one of the compiler's options.

    The compiler looks for operators, which cannot be kept on disk; here they stand under their names.
    """

    def __contains__(self, operator: object) -> bool:
        return super().__contains__(str(operator))


def declarations() -> Declarations:
    """Return the operators' C functions; they must have been loaded."""
    declared = Declarations()
    for name in OPERATORS:
        operator = getattr(torch.ops.specheads, name).default
        arguments = [f"{C_TYPES[str(each.type)]} {each.name}" for each in operator._schema.arguments]
        declared[str(operator)] = [f"AOTITorchError aoti_torch_cpu_{name}({', '.join(arguments)}, AtenTensorHandle* result)"]
    return declared


def packed_linear(x: Tensor, panels: Tensor, bias: Tensor | None, num_rows: int) -> Tensor:
    """Return `x W^T + b` (..., O) of `x` (..., I), summed in float32 or wider.

    Args:
        panels: W (O, I) in panels of P rows, (ceil(O / P), I, P); see `pack`.
        bias: (O,).
        num_rows: O.
    """
    return torch.ops.specheads.packed_linear(x, panels, bias, num_rows)


@contextmanager
def replaced_operations(places: RowPlaces | None = None) -> Iterator[None]:
    """While it is active, operators compute what they can of a forward pass and of a warp; for code that is traced.

    They replace transformers' `sdpa` attention and what takes longest in sampling.

    Args:
        places: of the tokens, where keys and values are those of all rows of a memory.
    """
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    sampling_functions = {name: getattr(sampling, name) for name in (*SAME_SAMPLING, *ROUNDED_SAMPLING)}

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        scale = options.get("scaling")
        others = (options.get(name) for name in OTHER_ATTENTION)
        if mask is None or any(isinstance(other, Tensor) or other for other in others):
            key, value = (key, value) if places is None else (key[places.rows], value[places.rows])
            return plain(module, query, key, value, mask, **options)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        of_rows = (None, None) if places is None else places
        return torch.ops.specheads.masked_attention(query, key, value, mask, *of_rows, scale), None

    # Compiled code rounds sums in another order anyway; what runs uncompiled keeps its bits.
    for name in sampling_functions if torch.compiler.is_compiling() else SAME_SAMPLING:
        setattr(sampling, name, getattr(torch.ops.specheads, name))
    try:
        with replaced_sdpa(attend):
            yield
    finally:
        for name, function in sampling_functions.items():
            setattr(sampling, name, function)


def pack(weight: Tensor) -> Tensor:
    """Return a weight (O, I) in panels, (ceil(O / P), I, P), with zeros in place of missing rows.

    In bfloat16, where the processor multiplies pairs of numbers, two neighbouring columns are stored as pairs, and I is even;
    elsewhere rows of a panel's two halves alternate, because such pairs become float32 in two instructions.
    """
    rows = torch.ops.specheads.panel_rows(weight.dtype == torch.float64)
    number, size = -(-weight.shape[0] // rows), weight.shape[1]
    in_pairs = weight.dtype == torch.bfloat16 and torch.ops.specheads.multiplies_pairs()
    size += size % 2 if in_pairs else 0
    padded = weight.new_zeros(number * rows, size)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    if in_pairs:
        return padded.reshape(number, rows, size // 2, 2).transpose(1, 2).reshape(number, size, rows)
    if weight.dtype == torch.bfloat16:
        return padded.reshape(number, 2, rows // 2, size).permute(0, 3, 2, 1).reshape(number, size, rows)
    return padded.reshape(number, rows, size).transpose(1, 2).contiguous()


def _shape_of_linear(x: Tensor, panels: Tensor, bias: Tensor | None, num_rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_rows)


def _shape_of_attention(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])
