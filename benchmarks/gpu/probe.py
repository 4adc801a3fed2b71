"""What is this machine, how fast are its memory, its launches and its attention, and how long does each kernel's first call take?

    python -m benchmarks.gpu.probe [--device cuda] [--tiny]

Attention has the shapes of Llama 3.1 8B at batch 1: one token, a verification, and a prompt, after short and long contexts. The
first call at a new shape is timed separately: some kernels build a plan for each shape, and shapes grow by one in generation.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.machine import product_speed
from benchmarks.gpu.script import Part, Setup, run_script
from benchmarks.steps import bandwidth, now

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128
QUERIES, CONTEXTS = (1, 8, 21, 512), (256, 1024, 4096)
NEW_SHAPES = 5  # contexts one longer each, whose first calls are timed
FORMS = ("masked", "expanded", "grouped")  # keys of every head and a mask; keys of every head; keys of groups of heads

Attention = Callable[[], Tensor]


def parts(setup: Setup) -> list[Part]:
    """Return what is measured."""
    device, tiny = setup.device, setup.tiny

    def memory() -> dict[str, Any]:
        return {"bytes_per_second": bandwidth(device), "operations_per_second": product_speed(device, 256 if tiny else 8192)}

    def launches() -> dict[str, Any]:
        return launch_seconds(device)

    def attention() -> dict[str, Any]:
        queries, contexts = (QUERIES[:2], (64,)) if tiny else (QUERIES, CONTEXTS)
        shapes = [(count, context) for context in contexts for count in queries if count <= context]
        return {"rows": [row for shape in shapes for row in attention_rows(device, *shape, setup.repeats)]}

    def flexible_attention() -> dict[str, Any]:
        size = 128 if tiny else max(CONTEXTS)
        queries, contexts = (QUERIES[:1], (64,)) if tiny else (QUERIES[:3], CONTEXTS[:2])
        attend = flex_attention if tiny else torch.compile(flex_attention, dynamic=False)
        shapes = [(count, context) for count in queries for context in contexts]
        return {"rows": [flexible_row(attend, device, *shape, size, setup.repeats) for shape in shapes]}

    return [memory, launches, attention, flexible_attention]


def launch_seconds(device: torch.device, count: int = 100) -> dict[str, Any]:
    """Return the seconds of a small operation in a queue, of one that is waited for, and of a number's way to the device."""
    number, host = torch.zeros(1, device=device), torch.zeros(1)

    def queued() -> None:
        for _ in range(count):
            number.add_(1)

    def awaited() -> None:
        for _ in range(count):
            number.add_(1).item()

    def sent() -> None:
        for _ in range(count):
            number.copy_(host)

    return {each.__name__: median_seconds(each, device, 5) / count for each in (queued, awaited, sent)}


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of `run`, after a call that is not timed."""
    run()
    taken = []
    for _ in range(repeats):
        start = now(device)
        run()
        taken.append(now(device) - start)
    return statistics.median(taken)


def attention_rows(device: torch.device, count: int, context: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the seconds of every backend and form for `count` queries after `context` positions."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for form in FORMS:
        for name, backend in BACKENDS.items():
            shape = {"backend": name, "form": form, "queries": count, "context": context}
            try:
                with sdpa_kernel([backend]):
                    yield shape | timed_attention(device, dtype, form, (count, context), repeats)
            except RuntimeError as error:  # the backend does not support the shape, the type or the device
                yield shape | {"refused": next(iter(str(error).strip().splitlines()), "")}


def timed_attention(
    device: torch.device, dtype: torch.dtype, form: str, shape: tuple[int, int], repeats: int
) -> dict[str, float | Sequence[float]]:
    """Return the seconds of the first call, of those at contexts one longer each, and of a call at a known shape."""
    count, context = shape
    first = first_call(attention_of(device, dtype, form, count, context), device)
    others = [first_call(attention_of(device, dtype, form, count, context + 1 + more), device) for more in range(NEW_SHAPES)]
    steady = median_seconds(attention_of(device, dtype, form, count, context), device, repeats)
    return {"first_call": first, "new_shapes": others, "seconds": steady}


def first_call(run: Attention, device: torch.device) -> float:
    """Return the seconds of one call."""
    now(device)
    start = time.perf_counter()
    run()
    return now(device) - start


def attention_of(device: torch.device, dtype: torch.dtype, form: str, count: int, context: int) -> Attention:
    """Return one layer's attention over random numbers; the mask of a chain that ends the context, or none."""
    heads = KEY_HEADS if form == "grouped" else HEADS
    query = torch.randn(1, HEADS, count, HEAD_SIZE, device=device, dtype=dtype)
    keys, values = (torch.randn(1, heads, context, HEAD_SIZE, device=device, dtype=dtype) for _ in range(2))
    mask = None
    if form == "masked":
        mask = torch.ones(count, context, dtype=torch.bool, device=device).tril(context - count)[None, None]
    return lambda: scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=form == "grouped")


def flexible_row(
    attend: Callable[..., Tensor], device: torch.device, count: int, context: int, size: int, repeats: int
) -> dict[str, Any]:
    """Return the seconds of FlexAttention that reads the first `context` of `size` positions, a number on the device.

    The first call of each number of queries compiles.
    """
    start = torch.full((), context - count, device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = torch.randn(1, HEADS, count, HEAD_SIZE, device=device, dtype=dtype)
    keys, values = (torch.randn(1, KEY_HEADS, size, HEAD_SIZE, device=device, dtype=dtype) for _ in range(2))

    def is_read(row: Tensor, head: Tensor, place: Tensor, key: Tensor) -> Tensor:
        return key <= start + place

    mask = create_block_mask(is_read, None, None, count, size, device=str(device))

    def run() -> Tensor:
        return attend(query, keys, values, block_mask=mask, enable_gqa=True)

    first = first_call(run, device)
    return {"queries": count, "context": context, "first_call": first, "seconds": median_seconds(run, device, repeats)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return the exit code."""
    with torch.no_grad():
        return run_script("probe", __doc__, parts, argv)


if __name__ == "__main__":
    raise SystemExit(main())
