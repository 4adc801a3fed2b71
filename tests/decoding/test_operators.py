"""The operators in C++ compute what float64 references compute.

A token's bits do not depend on the number of tokens.
"""

import pytest
import torch
from fakes import needs_compiler, random_tensor
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specheads import Warp
from specheads.decoding.engine.compiled_program import CompiledProgram
from specheads.decoding.engine.cpu import _RESULTS, CpuOperations, declarations
from specheads.decoding.engine.cpu.packed import _pack, _storage
from specheads.decoding.engine.reading import computing
from specheads.pair.quantization import lattice_of
from specheads.pair.sampling import TORCH, SoftmaxSums, computing_with, sample, softmax_sums

pytestmark = [needs_compiler, pytest.mark.usefixtures("built_operators")]

DTYPES = [torch.float32, torch.bfloat16]
# Sums are rounded to float32, and results to their type: half a unit in the last place, relative to
# the result.
NEAR = {
    torch.float32: {"atol": 3e-5, "rtol": 0},
    torch.bfloat16: {"atol": 1e-5, "rtol": 2**-8},
}
SHAPES = [(1, 1), (31, 17), (33, 65), (130, 100)]  # from less than a panel to several
COUNTS = [1, 2, 5, 6, 7, 12, 13, 25, 40]  # tokens; at most 12 are computed at a time
operators = torch.ops.specheads


def linear(x, weight, bias=None, storage=None, input_bits=32):
    panels = _pack(weight, storage)
    return operators.packed_linear(x, panels, bias, len(weight), input_bits)


def attention(query, key, value, mask, scale=0.3):
    return operators.masked_attention(query, key, value, mask, None, None, scale)


def expected_linear(x, weight, bias=None):
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def expected_attention(query, key, value, mask, scale=0.3):
    """Return the attention (B, T, heads, D) in float64."""
    group = query.shape[1] // key.shape[1]
    key = key.double().repeat_interleave(group, dim=1)
    value = value.double().repeat_interleave(group, dim=1)
    scores = scale * query.double() @ key.mT
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask.double()
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


def assert_near(actual, expected, dtype):
    assert actual.dtype == dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, **NEAR[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_a_linear_map(shape, has_bias, dtype, threads):
    weight = random_tensor(*shape, dtype=dtype)
    bias = random_tensor(shape[0], dtype=dtype) if has_bias else None
    for count in COUNTS:
        x = random_tensor(count, shape[1], dtype=dtype)
        assert_near(linear(x, weight, bias), expected_linear(x, weight, bias), dtype)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_linear_map_whose_weights_are_packed_in_16_bits_keeps_its_bits(storage, shape, threads):
    weight = random_tensor(*shape, dtype=torch.float32).to(storage).float()
    assert _storage(weight) == storage
    for count in COUNTS:
        x = random_tensor(count, shape[1], dtype=torch.float32)
        assert torch.equal(linear(x, weight, storage=storage), linear(x, weight))


@pytest.mark.parametrize("form", ["Q4_1", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("shape", [(1, 32), (33, 64), (300, 320)], ids=str)
def test_a_linear_map_whose_weights_are_packed_in_groups_rounds_as_sums_in_float32_do(
    form, shape, threads
):
    weight = lattice_of(random_tensor(*shape, dtype=torch.float32), form).weight()
    storage = _storage(weight)
    assert storage == (torch.int8 if form == "Q8_0" else torch.uint8)
    x = random_tensor(40, shape[1], dtype=torch.float32)
    alone = torch.cat([linear(row[None], weight, storage=storage) for row in x])
    # Of sums of so many rounded products.
    bound = 2**-24 * shape[1] * x.abs().sum(dim=1, keepdim=True) * weight.abs().max()
    assert ((alone - expected_linear(x, weight)).abs() <= bound).all()
    for count in COUNTS:
        assert torch.equal(linear(x[:count], weight, storage=storage), alone[:count])


def product_of_integers(x, lattice, largest):
    """Return the product (N, O) of `x` (N, I), in groups of 32 rounded to integers up to the
    `largest`, and a lattice's weights: sums of integers, times float64 numbers.
    """
    groups = x.unflatten(-1, (-1, 32))
    scale = groups.abs().amax(dim=-1, keepdim=True) / largest
    rounded = (groups * (1 / scale)).round().long()
    assert rounded.abs().amax(dim=-1).eq(largest).all()
    sums = torch.einsum("ngi,ogi->nog", rounded, lattice.q.long())
    d = lattice.d.double().squeeze(-1)
    m = lattice.m.double().squeeze(-1)
    of_groups = d * sums.double() + m * rounded.sum(dim=-1)[:, None].double()
    return (of_groups * scale.double().mT).sum(dim=-1)


@pytest.mark.parametrize(
    ("form", "bits", "largest"),
    [
        ("Q4_1", 16, 32767),
        ("Q4_0", 16, 32767),
        ("Q8_0", 16, 32767),
        ("Q4_1", 8, 127),
        ("Q4_0", 8, 127),
        ("Q8_0", 8, 32767),  # 16 bits in place of 8
    ],
)
@pytest.mark.parametrize("shape", [(1, 32), (33, 64), (300, 320)], ids=str)
def test_a_linear_map_in_groups_of_rounded_activations_sums_integers(
    form, bits, largest, shape, threads
):
    lattice = lattice_of(random_tensor(*shape, dtype=torch.float32), form)
    weight = lattice.weight()
    storage = _storage(weight)
    x = random_tensor(40, shape[1], dtype=torch.float32)
    alone = torch.cat([linear(row[None], weight, None, storage, bits) for row in x])
    # What remains are sums over groups in float32, of as many terms as q and m have.
    most = (lattice.q.float() * lattice.d.float()).abs().amax() + lattice.m.abs().amax()
    bound = 2**-23 * shape[1] / 32 * x.abs().sum(dim=1, keepdim=True) * most
    assert ((alone - product_of_integers(x, lattice, largest)).abs() <= bound).all()
    # A rounded activation is wrong by half a step of its group at most.
    step = x.unflatten(-1, (-1, 32)).abs().amax(dim=-1).repeat_interleave(32, dim=-1) / largest
    assert ((alone - expected_linear(x, weight)).abs() <= step @ weight.abs().mT / 2 + bound).all()
    for count in COUNTS:
        assert torch.equal(linear(x[:count], weight, None, storage, bits), alone[:count])


@pytest.mark.parametrize("sign", [-1, 1])
def test_sums_of_the_largest_products_fit_their_bits(sign):
    """All weights of a group but one have the largest q, and all activations the largest number."""
    weight = torch.full((40, 64), 15.0)
    weight[:, ::32] = 0.0
    x = torch.full((3, 64), float(sign))
    y = linear(x, weight, None, torch.uint8, 8)
    torch.testing.assert_close(y, torch.full((3, 40), sign * 15.0 * 62), atol=0, rtol=1e-6)


@pytest.mark.parametrize(("form", "bits"), [("Q8_0", 16), ("Q4_1", 8)])
def test_groups_of_activations_without_a_largest_one(form, bits):
    weight = lattice_of(random_tensor(40, 64, dtype=torch.float32), form).weight()
    x = torch.zeros(4, 64)
    x[1] = 1e-38
    x[2, 5] = torch.nan
    x[3, 5] = torch.inf
    y = linear(x, weight, None, _storage(weight), bits)
    assert torch.equal(y[0], torch.zeros(40))
    assert y[1].abs().max() < 1e-27
    assert y[2].isnan().all() and not y[3].isfinite().any()


def test_weights_are_packed_in_the_fewest_bits_that_hold_them():
    third = torch.tensor([1 / 3])
    tenth_bit = torch.tensor([1 + 2**-10])
    whole = torch.tensor([-2.0, 0.0, 2.0**127, 2**-100])
    assert _storage(whole, whole) == torch.bfloat16
    assert _storage(tenth_bit) == torch.float16
    for weights in ((whole, tenth_bit), (third,), (torch.tensor([torch.nan]),)):
        assert _storage(*weights) == torch.float32
    few = lattice_of(random_tensor(3, 64, dtype=torch.float32), "Q4_1").weight()
    assert _storage(few) == _storage(few, few[:1]) == torch.uint8
    assert _storage(few, torch.full((2, 64), 1 / 3)) == _storage(few[:, :40]) == torch.float32
    assert _storage(tenth_bit.bfloat16()) == torch.bfloat16


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7)], ids=str)
def test_a_linear_map_of_no_tokens(shape):
    weight = random_tensor(40, 7, dtype=torch.float32)
    assert linear(torch.zeros(shape), weight).shape == (*shape[:-1], 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_map_of_rows_of_tokens_in_any_memory_layout(dtype):
    weight = random_tensor(40, 24, dtype=dtype)
    rows = random_tensor(3, 24, 10, dtype=dtype).transpose(1, 2)  # (3, 10, 24), not contiguous
    for x in (rows, rows[:, ::2], rows[0], rows[0, 0]):
        assert_near(linear(x, weight), expected_linear(x, weight), dtype)


def test_a_linear_map_of_wrong_sizes_or_types_is_refused():
    weight = random_tensor(40, 24, dtype=torch.float32)
    for x in (torch.zeros(2, 23), torch.zeros(2, 24).double(), torch.zeros(2, 24).bfloat16()):
        with pytest.raises(RuntimeError, match="panels are"):
            linear(x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_in_every_number_of_tokens(dtype, threads):
    weight = random_tensor(500, 300, dtype=dtype)
    x = random_tensor(40, 300, dtype=dtype)
    whole = linear(x, weight)
    for count in range(1, 41):
        assert torch.equal(linear(x[:count], weight), whole[:count])
        assert torch.equal(linear(x[-count:], weight), whole[-count:])


def numbers(*shape):
    return random_tensor(*shape, dtype=torch.float32)


MASKS = {  # each is broadcast to (2, 6, T, S)
    "bools": lambda seen: seen,
    "bools of one row": lambda seen: seen[:1],
    "bools with strides": lambda seen: seen.mT.contiguous().mT,
    "minus infinity": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
    "numbers of each head": lambda seen: numbers(1, 6, *seen.shape[2:]),
    "numbers with strides": lambda seen: numbers(2, 1, *seen.shape[:1:-1]).mT,
    "bfloat16": lambda seen: numbers(*seen.shape).bfloat16(),
}


def causal(count, size):
    """Return which of S positions each of T tokens at their end attends to, for two rows of which
    one has fewer; (2, 1, T, S).
    """
    seen = torch.ones(2, 1, count, size, dtype=torch.bool).tril(size - count)
    seen[1, :, :, : size // 3] = False
    return seen


def assert_attends(query, key, value, mask):
    expected = expected_attention(query, key, value, mask)
    assert_near(attention(query, key, value, mask), expected, query.dtype)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_with_every_mask(dtype, mask):
    for count, size in ((1, 1), (1, 64), (3, 9), (7, 130)):
        query = random_tensor(2, 6, count, 24, dtype=dtype)
        key = random_tensor(2, 2, size, 24, dtype=dtype)
        value = random_tensor(2, 2, size, 24).to(dtype)
        assert_attends(query, key, value, MASKS[mask](causal(count, size)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (16, 24), (31, 33), (64, 64), (80, 128)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (7, 1)], ids=str)
def test_attention_with_every_shape_of_heads(heads, size, dtype, threads):
    query_heads, shared = heads
    head_size, value_size = size
    for count in (1, 2, 3, 5, 13):
        query = random_tensor(2, query_heads, count, head_size, dtype=dtype)
        key = random_tensor(2, shared, 37, head_size, dtype=dtype)
        value = random_tensor(2, shared, 37, value_size, dtype=dtype)
        assert_attends(query, key, value, causal(count, 37))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_to_tensors_in_any_memory_layout(dtype):
    """A model passes views: queries by token, a bucket of the memory."""
    mask = causal(5, 40)
    query = random_tensor(2, 5, 6, 24, dtype=dtype).transpose(1, 2)
    memory = random_tensor(2, 2, 64, 48, dtype=dtype)
    by_token = memory.transpose(1, 2)[:, :40, :, :24].transpose(1, 2)
    shared = memory[:, :1, :40, :24].expand(2, 2, 40, 24)
    assert_attends(query, memory[:, :, :40, :24], memory[:, :, :40, 24:], mask)
    assert_attends(query, memory[:, :, 10:50, ::2], memory[:, :, 24:, 1::2], mask)
    assert_attends(query, by_token, shared, mask)


def test_attention_with_large_scores():
    """A softmax that subtracts nothing would overflow."""
    query = 100 * numbers(2, 6, 3, 16)
    key = 100 * numbers(2, 2, 20, 16)
    value = numbers(2, 2, 20, 16)
    actual = attention(query, key, value, causal(3, 20)).double()
    expected = expected_attention(query, key, value, causal(3, 20))
    torch.testing.assert_close(actual, expected, atol=1e-2, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_attending_token_has_the_same_bits_in_every_number_of_tokens(dtype, threads):
    query = random_tensor(1, 6, 13, 24, dtype=dtype)
    mask = causal(13, 128)[:1]
    key = random_tensor(1, 2, 128, 24, dtype=dtype)
    value = random_tensor(1, 2, 128, 24, dtype=dtype)
    whole = attention(query, key, value, mask)
    for count in range(1, 14):
        for part in (slice(0, count), slice(13 - count, 13)):
            some = attention(query[:, :, part], key, value, mask[:, :, part])
            assert torch.equal(some, whole[:, part])


def test_masked_positions_leave_no_trace():
    """What lies in the memory beyond a text is never seen, in whichever bucket it is read."""
    query = numbers(1, 6, 3, 24)
    key = numbers(1, 2, 64, 24)
    value = numbers(1, 2, 64, 24)
    mask = causal(3, 64)[:1]
    mask[..., 40:] = False
    whole = attention(query, key, value, mask)
    key[:, :, 40:] = 1e6
    value[:, :, 40:] = 1e6
    assert torch.equal(attention(query, key, value, mask), whole)
    part = attention(query, key[:, :, :40], value[:, :, :40], mask[..., :40])
    torch.testing.assert_close(part, whole, atol=1e-6, rtol=0)


class Layer(nn.Module):
    """The attributes of an attention layer that transformers' attention functions read."""

    num_key_value_groups = 3
    is_causal = True


@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": causal(5, 9), "scaling": 0.7},
        {"attention_mask": causal(5, 9), "dropout": 0.0, "is_causal": None, "cache": None},
        {"attention_mask": None, "is_causal": True},
        {"attention_mask": causal(5, 9), "position_bias": numbers(1, 6, 5, 9)},
    ],
    ids=["scaling", "empty options", "no mask", "bias of positions"],
)
def test_attention_of_transformers_with_every_option(options):
    tensors = (numbers(2, 6, 5, 16), numbers(2, 2, 9, 16), numbers(2, 2, 9, 16))
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with computing(CpuOperations()):
        actual, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](Layer(), *tensors, **options)
    expected, _ = plain(Layer(), *tensors, **options)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_attention_is_restored_after_an_error():
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(ValueError, match="in between"), computing(CpuOperations()):
        raise ValueError("in between")
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is plain


def test_operators_are_traced_with_open_sizes():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("panels", _pack(numbers(24, 24)))

        def forward(self, x, key):
            y = operators.packed_linear(x, self.panels, None, 24, 32)[:, None]
            mask = torch.ones(1, 1, y.shape[2], key.shape[2], dtype=torch.bool)
            return operators.masked_attention(y, key, key, mask, None, None, 0.5)

    module = Both()
    open_sizes = ({1: torch.export.Dim.DYNAMIC}, {2: torch.export.Dim.DYNAMIC})
    example = (numbers(1, 5, 24), numbers(1, 1, 9, 24))
    exported = torch.export.export(module, example, dynamic_shapes=open_sizes).module()
    x = numbers(1, 3, 24)
    key = numbers(1, 1, 17, 24)
    assert torch.equal(exported(x, key), module(x, key))


SIZES = [1, 2, 7, 16, 63, 257, 2048, 2051]


@pytest.mark.parametrize("size", SIZES)
def test_the_kth_largest(size, threads):
    x = numbers(3, 2, size)
    hidden = x.masked_fill(x < x.median(), -torch.inf)  # as by another warp
    for logits in (x, x.round(), torch.zeros_like(x), x.mT.contiguous().mT, hidden):
        for k in {1, 2, 5, 17, 50, 1000, size - 1, size} & set(range(1, size + 1)):
            assert torch.equal(operators.kth_largest(logits, k), TORCH.kth_largest(logits, k))


@pytest.mark.parametrize("place", [0, 5, 299, 303])
def test_a_row_with_a_nan_has_no_kth_largest(place):
    x = numbers(4, 304)
    x[2, place] = torch.nan
    assert operators.kth_largest(x, 5).isnan().flatten().tolist() == [False, False, True, False]


@pytest.mark.parametrize("size", SIZES)
def test_the_softmax_of_kept_logits(size, threads):
    x = 4 * numbers(3, 2, size)
    hidden = x.masked_fill(x < x.median(), -torch.inf)
    hidden[..., 0] = 0  # a row without any finite logit has no distribution
    for logits in (x, x.round(), torch.zeros_like(x), x.mT.contiguous().mT, hidden):
        for k in {1, 2, min(50, size), size} & set(range(1, size + 1)):
            least = logits.topk(k).values[..., -1:]
            actual = operators.kept_softmax(logits, least)
            expected = TORCH.kept_softmax(logits.double(), least.double())
            torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=0)
            assert torch.equal(actual == 0, expected == 0)  # the same ties survive


@pytest.mark.parametrize("size", SIZES)
def test_the_sums_of_a_softmax(size, threads):
    x = 4 * numbers(3, 2, size)
    hidden = x.masked_fill(x < x.median(), -torch.inf)
    hidden[..., 0] = 0
    for logits in (x, x - 1e4, torch.zeros_like(x), x.mT.contiguous().mT, hidden):
        actual = SoftmaxSums(*operators.softmax_sums(logits).unbind(-1))
        for name, value in softmax_sums(logits.double())._asdict().items():
            of_name = getattr(actual, name)
            torch.testing.assert_close(of_name.double(), value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_sums_of_a_row_without_a_distribution_are_nan(value):
    logits = torch.zeros(4, 300)
    logits[1, 299] = value
    logits[2, :] = -torch.inf
    sums = SoftmaxSums(*operators.softmax_sums(logits).unbind(-1))
    assert sums.total.isnan().tolist() == sums.moment.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_is_nan(value):
    logits = torch.zeros(4, 300)
    logits[1, 299] = value
    logits[2, :] = -torch.inf
    actual = operators.kept_softmax(logits, operators.kth_largest(logits, 1))
    assert actual.isnan().all(dim=1).tolist() == [False, True, True, False]
    assert torch.equal(actual[::3], TORCH.kept_softmax(logits, logits.amax(-1, keepdim=True))[::3])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_p", [1e-3, 0.5, 0.9, 1 - 1e-9, 1.0])
def test_the_nucleus(size, top_p):
    x = numbers(3, 2, size)
    few = (4 * x).masked_fill(x < x.topk(min(5, size)).values[..., -1:], -torch.inf)
    for logits in (x, 4 * x, (4 * x).round(), torch.zeros_like(x), few, x.mT.contiguous().mT):
        probs = logits.softmax(dim=-1)
        actual = operators.nucleus(probs, top_p)
        expected = TORCH.nucleus(probs, top_p)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
        assert torch.equal(actual == 0, expected == 0)


def test_the_nucleus_of_nan_is_nan():
    probs = torch.tensor([[0.5, 0.3, 0.2], [torch.nan] * 3])
    assert operators.nucleus(probs, 0.6).isnan().tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize("size", SIZES)
def test_the_most_likely_token(size, threads):
    x = numbers(3, 2, size)
    nan = x.clone()
    nan[1, :, size // 2 :] = torch.nan
    infinite = x.clone()
    infinite[0, 1, -1] = torch.inf
    infinite[1] = -torch.inf
    for rows in (x, x.round(), torch.zeros_like(x), x.mT.contiguous().mT, nan, infinite):
        assert torch.equal(operators.most_likely(rows), rows.argmax(dim=-1))


@pytest.mark.parametrize("size", SIZES)
def test_the_token_at_a_uniform_number(size, threads):
    weights = numbers(40, size).exp()
    uniform = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    uniform[:4] = torch.tensor([0.0, 0.5, 1 - 2**-53, 1 - 2**-53])
    few = weights.where(weights >= weights.topk(min(5, size)).values[:, -1:], 0)
    none = torch.zeros_like(weights)
    point = none.scatter(1, (weights.argsort() == 0).long().argmax(dim=1, keepdim=True), 1e-30)
    scaled = weights / weights.sum(dim=1, keepdim=True)
    for probs in (weights, scaled, few, point, none, weights.mT.contiguous().mT):
        assert torch.equal(operators.token_at(probs, uniform), TORCH.token_at(probs, uniform))


def test_the_sampling_operators_of_no_rows_return_none():
    rows = torch.zeros(0, 7)
    assert operators.kth_largest(rows, 3).shape == (0, 1)
    assert operators.nucleus(rows, 0.5).shape == (0, 7)
    assert operators.token_at(rows, rows[:, 0].double()).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: operators.kth_largest(x, 0), "k is 0 of 7"),
        (lambda x: operators.kth_largest(x, 8), "k is 8 of 7"),
        (lambda x: operators.most_likely(x[:, :0]), "no number"),
        (lambda x: operators.nucleus(x.half(), 0.5), "no operator for Half"),
        (lambda x: operators.nucleus(x, 0.0), "top_p is 0"),
        (lambda x: operators.nucleus(x, 1.5), "top_p is 1.5"),
        (lambda x: operators.token_at(x, x[:, 0]), "uniform numbers are Float"),
        (lambda x: operators.token_at(x, x[:1, 0].double()), "uniform numbers are Double"),
    ],
)
def test_other_tensors_are_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.zeros(3, 7))


class WarpedAndSampled(nn.Module):
    def __init__(self, warp):
        super().__init__()
        self.warp = warp

    def forward(self, logits, uniform, places, inputs):
        with computing_with(CpuOperations()):
            probs = self.warp(logits)
            return probs, self.warp.draw(probs, uniform), sample(probs, uniform)


@pytest.mark.parametrize(
    ("warp", "dtype"),
    [
        (Warp(0.7, 50, 0.9, 0.02), torch.bfloat16),
        (Warp(top_p=0.5), torch.float64),
        (Warp(temperature=0), torch.float32),
    ],
    ids=str,
)
def test_compiled_sampling_is_that_of_the_warp(warp, dtype):
    logits = random_tensor(6, 304).round(decimals=1).to(dtype)  # with ties
    uniform = torch.rand(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    args = logits, uniform, torch.zeros(3), ()
    module = WarpedAndSampled(warp)
    program = CompiledProgram.compile(module, args, {}, {"cpp_wrapper": True})
    probs, token, sampled = program.bind(module, [])(*args)
    expected = warp(logits)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=0)
    assert torch.equal(probs == 0, expected == 0)
    assert torch.equal(token, warp.draw(expected, uniform))
    assert torch.equal(sampled, sample(expected, uniform))


def test_every_operator_is_declared_for_the_compiler():
    declared = declarations()
    for name in _RESULTS:
        (declaration,) = declared[f"specheads.{name}.default"]
        assert declaration.startswith(f"AOTITorchError (*aoti_torch_cpu_{name})(AtenTensorHandle ")
        assert getattr(torch.ops.specheads, name).default in declared
