"""Attention in groups and parts is transformers' attention, and replaces it only under masks, where
query heads share keys.
"""

import pytest
import torch
from fakes import needs_compiler, random_tensor
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specheads.decoding.engine.compiled_program import OPTIONS, CompiledProgram
from specheads.decoding.engine.cuda_graph import (
    PART,
    _attend,
    _attend_parts,
    _GroupedOperations,
)
from specheads.decoding.engine.reading import computing

SHAPES = [
    (heads, groups, tokens, parts)
    for heads, groups in ((4, 4), (6, 2), (8, 1))
    for tokens, parts in ((1, 1), (5, 3), (13, 2))
]


class Layer(nn.Module):
    """The attributes of an attention layer that transformers' attention reads."""

    is_causal = True

    def __init__(self, share):
        super().__init__()
        self.num_key_value_groups = share


def tensors(batch, heads, groups, tokens, parts, dtype=torch.float64):
    """Return a query, and keys and values that lie within a larger memory, as an engine's do."""
    size = parts * PART
    memory = [
        random_tensor(batch, groups, size + 2 * PART, 8, dtype=dtype)[:, :, :size] for _ in range(2)
    ]
    return (
        random_tensor(batch, tokens, heads, 8, dtype=dtype).transpose(1, 2),
        memory[0],
        memory[1].flip(2),
    )


def causal(tokens, size, start):
    return (torch.arange(size) <= start + torch.arange(tokens)[:, None])[None, None]


def random_mask(batch, tokens, size):
    """A mask such as a tree's: every token sees itself, and anything else or nothing."""
    seen = random_tensor(batch, 1, tokens, size) > 1.0
    seen[:, :, :, 0] = True
    return seen


@pytest.mark.parametrize(("heads", "groups", "tokens", "parts"), SHAPES)
def test_attention_is_that_of_transformers(heads, groups, tokens, parts):
    query, key, value = tensors(1, heads, groups, tokens, parts)
    for mask in (
        causal(tokens, parts * PART, 17),
        causal(tokens, parts * PART, parts * PART - tokens),
        random_mask(1, tokens, parts * PART),
    ):
        for scale in (None, 0.3):
            expected, _ = sdpa_attention_forward(
                Layer(heads // groups), query, key, value, mask, scaling=scale
            )
            actual = _attend(query, key, value, mask, scale)
            assert actual.shape == expected.shape and actual.is_contiguous()
            torch.testing.assert_close(actual, expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("shared", [False, True], ids=["a mask for each", "one mask"])
def test_rows_of_a_batch_attend_each_to_its_memory(shared):
    query, key, value = tensors(3, 6, 2, 4, 2)
    mask = random_mask(1 if shared else 3, 4, 2 * PART)
    expected, _ = sdpa_attention_forward(Layer(3), query, key, value, mask.expand(3, -1, -1, -1))
    torch.testing.assert_close(_attend(query, key, value, mask), expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_parts_that_are_masked_throughout_leave_no_trace(dtype):
    query, key, value = tensors(1, 4, 2, 3, 3, dtype)
    expected = _attend(query, key[:, :, :PART], value[:, :, :PART], causal(3, PART, 60))
    key[:, :, PART:] = 100
    value[:, :, PART:] = 100
    assert torch.equal(_attend(query, key, value, causal(3, 3 * PART, 60)), expected)


def test_the_kernel_of_a_gpu_has_the_shapes_that_are_expected():
    """As far as it can be asked without a GPU: torch knows the shapes of its results."""
    query = torch.empty(8, 4, 20, 64, device="meta")
    key = torch.empty(8, 4, PART, 64, device="meta")
    bias = torch.empty(1, 4, 20, PART, device="meta").expand(8, -1, -1, -1)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out, log_sums, *_ = kernel(query, key, key, bias, True, scale=0.1)
    shapes = [tensor.shape for tensor in _attend_parts(query, key, key, bias, 0.1)]
    assert [out.shape, log_sums[..., :20].shape] == shapes


def test_only_masked_attention_is_replaced_and_only_while_asked():
    query, key, value = tensors(1, 6, 2, 4, 1)
    mask = causal(4, PART, 17)
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    layer = Layer(3)
    with computing(_GroupedOperations()):
        ours = ALL_ATTENTION_FUNCTIONS["sdpa"]
        assert torch.equal(
            ours(layer, query, key, value, mask)[0], _attend(query, key, value, mask)
        )
        others = [
            (None, {}),
            (torch.zeros(1, 1, 4, PART).double(), {}),
            (mask.expand(-1, 6, -1, -1), {}),
        ]
        for other, options in [*others, (mask, {"position_bias": random_tensor(1, 6, 4, PART)})]:
            assert torch.equal(
                ours(layer, query, key, value, other, **options)[0],
                plain(layer, query, key, value, other, **options)[0],
            )
        # each has its keys
        query = query[:, :2]
        layer = Layer(1)
        assert torch.equal(
            ours(layer, query, key, value, mask)[0], plain(layer, query, key, value, mask)[0]
        )
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is plain


class Attention(nn.Module):
    """A call with the signature of a step: numbers of tokens and of keys are open."""

    def forward(self, query, start, places, memory, inputs):
        size = places.shape[0]
        mask = (torch.arange(size) <= start + torch.arange(query.shape[1])[:, None])[None, None]
        return (
            _attend(
                query.transpose(1, 2), memory[0][0][:, :, :size], memory[0][1][:, :, :size], mask
            ),
        )


@pytest.mark.full
@needs_compiler
def test_it_is_compiled_for_any_number_of_tokens_and_of_parts():
    memory = [(random_tensor(1, 2, 8 * PART, 8), random_tensor(1, 2, 8 * PART, 8))]
    places = torch.zeros(8 * PART)
    start = torch.tensor(40)
    module = Attention()
    example = (random_tensor(1, 5, 6, 8), start, places[: 2 * PART], memory, ())
    step = CompiledProgram.compile(module, example, {0: 1, 2: 0}, OPTIONS).bind(module, memory)
    for tokens, parts in ((5, 2), (3, 1), (9, 7)):
        args = (random_tensor(1, tokens, 6, 8), start, places[: parts * PART])
        torch.testing.assert_close(step(*args, ()), module(*args, memory, ()), atol=1e-13, rtol=0)
