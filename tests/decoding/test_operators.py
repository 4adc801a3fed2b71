"""The operators of kernels/ compute what float64 references compute.

A token's bits do not depend on the number of tokens.
"""

import ctypes
import pickle

import pytest
import torch
from fakes import needs_compiler, random_tensor
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specheads import Warp
from specheads.decoding.engine.cpu import _FOLDER, _RESULTS, CpuOperations, declarations
from specheads.decoding.engine.cpu.packed import _pack, _storage
from specheads.decoding.engine.reading import computing
from specheads.pair.quantization import lattice_of
from specheads.pair.sampling import active

pytestmark = [needs_compiler, pytest.mark.usefixtures("built_operators")]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Sums are rounded to float32 or float64, and results to their type: half a unit in the last place,
# relative to the result.
NEAR = {
    torch.float64: {"atol": 1e-12, "rtol": 0},
    torch.float32: {"atol": 3e-5, "rtol": 0},
    torch.bfloat16: {"atol": 1e-5, "rtol": 2**-8},
    torch.float16: {"atol": 1e-5, "rtol": 2**-11},
}
SHAPES = [
    (1, 1),
    (5, 3),
    (31, 17),
    (32, 64),
    (33, 65),
    (130, 100),
]  # from less than a panel to several
COUNTS = [1, 2, 5, 6, 7, 11, 12, 13, 25, 40]  # tokens; at most 12 are computed at a time


def generator():
    return torch.Generator().manual_seed(0)


def linear(x, weight, bias=None):
    return torch.ops.specheads.packed_linear(x, _pack(weight), bias, len(weight))


def attention(query, key, value, mask, scale=0.3):
    return torch.ops.specheads.masked_attention(query, key, value, mask, None, None, scale)


def expected_linear(x, weight, bias=None):
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def expected_attention(query, key, value, mask, scale=0.3):
    """Return the attention (B, T, heads, D) in float64."""
    query = query.double()
    key = key.double()
    value = value.double()
    group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    scores = scale * query @ key.mT
    scores = (
        scores.masked_fill(~mask, -torch.inf)
        if mask.dtype == torch.bool
        else scores + mask.double()
    )
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


NARROW = {  # the type in which weights are packed, and how they are rounded to what it holds
    "bfloat16": (torch.bfloat16, lambda weight: weight.bfloat16().float()),
    "float16": (torch.float16, lambda weight: weight.half().float()),
    "Q4_1": (torch.uint8, lambda weight: lattice_of(weight, "Q4_1").weight()),
    "Q4_0": (torch.uint8, lambda weight: lattice_of(weight, "Q4_0").weight()),
    "Q8_0": (torch.int8, lambda weight: lattice_of(weight, "Q8_0").weight()),
}
GROUPED = [(1, 32), (33, 64), (130, 96), (300, 320)]


@pytest.mark.parametrize(
    ("form", "shape"),
    [(form, shape) for form in NARROW if form[0] != "Q" for shape in SHAPES],
    ids=str,
)
def test_a_linear_map_whose_weights_are_packed_in_fewer_bits_keeps_its_bits(form, shape, threads):
    storage, rounded = NARROW[form]
    weight = rounded(random_tensor(*shape, dtype=torch.float32))
    panels = _pack(weight, _storage(weight))
    assert panels.dtype == storage
    for count in COUNTS:
        x = random_tensor(count, shape[1], dtype=torch.float32)
        narrow = torch.ops.specheads.packed_linear(x, panels, None, len(weight))
        assert torch.equal(narrow, linear(x, weight))


@pytest.mark.parametrize(
    ("form", "shape"),
    [(form, shape) for form in NARROW if form[0] == "Q" for shape in GROUPED],
    ids=str,
)
def test_a_linear_map_whose_weights_are_packed_in_groups_rounds_as_sums_in_float32_do(
    form, shape, threads
):
    storage, rounded = NARROW[form]
    weight = rounded(random_tensor(*shape, dtype=torch.float32))
    panels = _pack(weight, _storage(weight))
    assert panels.dtype == storage
    x = random_tensor(40, shape[1], dtype=torch.float32)
    alone = torch.cat(
        [torch.ops.specheads.packed_linear(row[None], panels, None, len(weight)) for row in x]
    )
    bound = (
        2**-24 * shape[1] * x.abs().sum(dim=1, keepdim=True) * weight.abs().max()
    )  # of sums of so many rounded products
    assert ((alone - linear(x.double(), weight.double())).abs() <= bound).all()
    for count in range(1, 41):
        assert torch.equal(
            torch.ops.specheads.packed_linear(x[:count], panels, None, len(weight)), alone[:count]
        )


def test_weights_are_packed_in_the_fewest_bits_that_hold_them():
    third = torch.tensor([1 / 3])
    tenth_bit = torch.tensor([1 + 2**-10])
    whole = torch.tensor([-2.0, 0.0, 2.0**127, 2**-100])
    assert _storage(whole, whole) == torch.bfloat16 and _storage(tenth_bit) == torch.float16
    assert (
        _storage(whole, tenth_bit)
        == _storage(third)
        == _storage(torch.tensor([torch.nan]))
        == torch.float32
    )
    few = lattice_of(torch.randn(3, 64, generator=generator()), "Q4_1").weight()
    assert _storage(few) == torch.uint8 and _storage(few, few[:1]) == torch.uint8
    assert _storage(few, torch.full((2, 64), 1 / 3)) == _storage(few[:, :40]) == torch.float32
    assert (
        _storage(whole.double()) == torch.float64
        and _storage(tenth_bit.bfloat16()) == torch.bfloat16
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_panels_hold_the_rows_of_a_weight_and_zeros(dtype):
    """Column i of a panel has the numbers i of its rows, in bfloat16 pairs of columns or those of
    its two halves alternately.
    """
    weight = random_tensor(70, 3, dtype=dtype)
    rows = torch.ops.specheads.panel_rows(dtype == torch.float64)
    panels = _pack(weight)
    number = -(-70 // rows)
    in_pairs = dtype == torch.bfloat16 and torch.ops.specheads.multiplies_pairs()
    assert (
        panels.shape == (number, 4 if in_pairs else 3, rows)
        and panels.is_contiguous()
        and panels.dtype == dtype
    )
    if in_pairs:
        panels = panels.view(number, 2, rows, 2).transpose(2, 3).reshape(number, 4, rows)
        assert not panels[:, 3].any()
        panels = panels[:, :3]
    elif dtype == torch.bfloat16:
        panels = panels.view(number, 3, rows // 2, 2).transpose(2, 3).reshape(number, 3, rows)
    unpacked = panels.transpose(1, 2).reshape(-1, 3)
    assert torch.equal(unpacked[:70], weight) and not unpacked[70:].any()


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7), (0, 3, 7)], ids=str)
def test_a_linear_map_of_no_tokens(shape):
    assert linear(torch.zeros(shape), random_tensor(40, 7, dtype=torch.float32)).shape == (
        *shape[:-1],
        40,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_map_of_rows_of_tokens_in_any_memory_layout(dtype):
    weight = random_tensor(40, 24, dtype=dtype)
    rows = random_tensor(3, 24, 10, dtype=dtype).transpose(1, 2)  # (3, 10, 24), not contiguous
    for x in (
        rows,
        rows[:, ::2],
        rows[:, -1:],
        rows[0],
        rows[0, 0],
        random_tensor(10, 48, dtype=dtype)[:, ::2],
    ):
        assert_near(linear(x, weight), expected_linear(x, weight), dtype)


def test_a_linear_map_of_a_model_with_wrong_sizes_or_types_is_refused():
    weight = random_tensor(40, 24, dtype=torch.float32)
    for x in (
        random_tensor(2, 23, dtype=torch.float32),
        random_tensor(2, 24),
        random_tensor(2, 24, dtype=torch.bfloat16),
    ):
        with pytest.raises(RuntimeError, match="panels are"):
            linear(x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_in_every_number_of_tokens(dtype, threads):
    weight = random_tensor(500, 300, dtype=dtype)
    bias = random_tensor(500, dtype=dtype)
    x = random_tensor(40, 300, dtype=dtype)
    whole = linear(x, weight, bias)
    for count in range(1, 41):
        assert torch.equal(linear(x[:count], weight, bias), whole[:count])
        assert torch.equal(linear(x[-count:], weight, bias), whole[-count:])


MASKS = {  # each is broadcast to (2, 6, T, S)
    "bools": lambda seen: seen,
    "bools of one row": lambda seen: seen[:1],
    "bools with strides": lambda seen: seen.mT.contiguous().mT,
    "expanded bools": lambda seen: seen[:1].expand(2, 6, -1, -1),
    "minus infinity": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
    "the least number": (
        lambda seen: torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    ),
    "numbers of each head": lambda seen: torch.randn(1, 6, *seen.shape[2:], generator=generator()),
    "numbers with strides": lambda seen: (
        torch.randn(2, 1, *seen.shape[:1:-1], generator=generator()).mT
    ),
    "float64": lambda seen: torch.randn(seen.shape, generator=generator()).double(),
    "bfloat16": lambda seen: torch.randn(seen.shape, generator=generator()).bfloat16(),
}


def causal(count, size):
    """Return which of S positions each of T tokens at their end attends to, for two rows of which
    one has fewer; (2, 1, T, S).
    """
    seen = torch.ones(2, 1, count, size, dtype=torch.bool).tril(size - count)
    seen[1, :, :, : size // 3] = False
    return seen


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_with_every_mask(dtype, mask):
    for count, size in ((1, 1), (1, 64), (3, 9), (7, 130)):
        query = random_tensor(2, 6, count, 24, dtype=dtype)
        key = random_tensor(2, 2, size, 24, dtype=dtype)
        value = random_tensor(2, 2, size, 24)
        value = value.to(dtype)
        made = MASKS[mask](causal(count, size))
        assert_near(
            attention(query, key, value, made), expected_attention(query, key, value, made), dtype
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [(1, 1), (3, 5), (8, 8), (16, 24), (31, 33), (64, 64), (65, 8), (80, 128)], ids=str
)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (7, 1)], ids=str)
def test_attention_with_every_shape_of_heads(heads, size, dtype, threads):
    (query_heads, shared) = heads
    (head_size, value_size) = size
    for count in (1, 2, 3, 5, 13):
        query = random_tensor(2, query_heads, count, head_size, dtype=dtype)
        mask = causal(count, 37)
        key = random_tensor(2, shared, 37, head_size, dtype=dtype)
        value = random_tensor(2, shared, 37, value_size, dtype=dtype)
        assert_near(
            attention(query, key, value, mask), expected_attention(query, key, value, mask), dtype
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [24, 32])
def test_attention_to_tensors_in_any_memory_layout(size, dtype):
    """A model passes views: queries by token, a bucket of the memory."""
    mask = causal(5, 40)
    query = random_tensor(2, 5, 6, size, dtype=dtype).transpose(1, 2)
    memory = random_tensor(2, 2, 64, 2 * size, dtype=dtype)
    views = [
        (memory[:, :, :40, :size], memory[:, :, :40, size:]),
        (memory[:, :, 10:50, ::2], memory[:, :, 24:, 1::2]),
        (
            memory.transpose(1, 2)[:, :40, :, :size].transpose(1, 2),
            memory[:, :1, :40, :size].expand(2, 2, 40, size),
        ),
    ]
    for key, value in views:
        assert_near(
            attention(query, key, value, mask), expected_attention(query, key, value, mask), dtype
        )


def test_attention_with_large_scores():
    """A softmax that subtracts nothing would overflow."""
    query = 100 * random_tensor(2, 6, 3, 16)
    key = 100 * random_tensor(2, 2, 20, 16)
    value = random_tensor(2, 2, 20, 16)
    for dtype in (torch.float64, torch.float32):
        tensors = [x.to(dtype) for x in (query, key, value)]
        actual = attention(*tensors, causal(3, 20)).double()
        torch.testing.assert_close(
            actual, expected_attention(*tensors, causal(3, 20)), atol=1e-2, rtol=0
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_attending_token_has_the_same_bits_in_every_number_of_tokens(dtype, threads):
    query = random_tensor(1, 6, 13, 24, dtype=dtype)
    mask = causal(13, 128)[:1]
    key = random_tensor(1, 2, 128, 24, dtype=dtype)
    value = random_tensor(1, 2, 128, 24, dtype=dtype)
    whole = attention(query, key, value, mask)
    for count in range(1, 14):
        for part in (slice(0, count), slice(13 - count, 13)):
            assert torch.equal(
                attention(query[:, :, part], key, value, mask[:, :, part]), whole[:, part]
            )


def test_masked_positions_leave_no_trace():
    """What lies in the memory beyond a text is never seen, in whichever bucket it is read."""
    query = random_tensor(1, 6, 3, 24)
    key = random_tensor(1, 2, 64, 24)
    value = random_tensor(1, 2, 64, 24)
    mask = causal(3, 64)[:1]
    mask[..., 40:] = False
    whole = attention(query, key, value, mask)
    key[:, :, 40:] = 1e6
    value[:, :, 40:] = 1e6
    assert torch.equal(attention(query, key, value, mask), whole)
    part = attention(query, key[:, :, :40], value[:, :, :40], mask[..., :40])
    torch.testing.assert_close(part, whole, atol=1e-12, rtol=0)


class Layer(nn.Module):
    """The attributes of an attention layer that transformers' attention functions read."""

    num_key_value_groups = 3
    is_causal = True


def test_attention_of_transformers_is_replaced_only_while_asked():
    query = random_tensor(2, 6, 5, 16)
    key = random_tensor(2, 2, 9, 16)
    value = random_tensor(2, 2, 9, 16)
    mask = causal(5, 9)
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    for options in (
        {},
        {"scaling": 0.7},
        {"dropout": 0.0, "is_causal": None, "position_bias": None, "cache": None},
    ):
        with computing(CpuOperations()):
            actual, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](
                Layer(), query, key, value, mask, **options
            )
        expected, _ = plain(Layer(), query, key, value, mask, **options)
        assert weights is None
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"position_bias": random_tensor(1, 6, 5, 5), "attention_mask": causal(5, 5)},
    ],
    ids=["no mask", "causal", "bias of positions"],
)
def test_attention_that_the_operator_does_not_have_is_that_of_transformers(options):
    options = {"attention_mask": None, **options}
    tensors = (random_tensor(2, 6, 5, 16), random_tensor(2, 2, 5, 16), random_tensor(2, 2, 5, 16))
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with computing(CpuOperations()):
        mask = options["attention_mask"]
        others = {k: v for k, v in options.items() if k != "attention_mask"}
        actual, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](Layer(), *tensors, mask, **others)
    assert torch.equal(actual, plain(Layer(), *tensors, **options)[0])


def test_attention_is_restored_after_an_error():
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(ValueError, match="in between"), computing(CpuOperations()):
        raise ValueError("in between")
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is plain


def test_attention_that_someone_else_replaced_stays_replaced(monkeypatch):
    def other(*args, **options):
        return None, None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", other)
    with computing(CpuOperations()):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not other
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is other


def test_operators_are_traced_with_open_sizes():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(random_tensor(24, 24))
            self.register_buffer("panels", _pack(self.weight.detach()))

        def forward(self, x, key):
            y = torch.ops.specheads.packed_linear(x, self.panels, None, 24)[:, None]
            mask = torch.ones(1, 1, y.shape[2], key.shape[2], dtype=torch.bool)
            return torch.ops.specheads.masked_attention(y, key, key, mask, None, None, 0.5)

    module = Both()
    open_sizes = ({1: torch.export.Dim.DYNAMIC}, {2: torch.export.Dim.DYNAMIC})
    exported = torch.export.export(
        module, (random_tensor(1, 5, 24), random_tensor(1, 1, 9, 24)), dynamic_shapes=open_sizes
    ).module()
    x = random_tensor(1, 3, 24)
    key = random_tensor(1, 1, 17, 24)
    assert torch.equal(exported(x, key), module(x, key))
    torch.library.opcheck(
        torch.ops.specheads.packed_linear.default,
        (x, module.panels, None, 24),
        test_utils="test_faketensor",
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 2, 7, 16, 63, 257, 2048, 2051])
def test_the_kth_largest(size, dtype, threads):
    x = random_tensor(3, 2, size, dtype=dtype)
    rows = [
        x,
        x.round(),
        torch.zeros_like(x),
        x.sort().values,
        x.sort(descending=True).values,
        x.mT.contiguous().mT,
    ]
    hidden = x.masked_fill(x < x.median(), -torch.inf)  # as by another warp
    for logits in (*rows, hidden, -torch.inf * torch.ones_like(x)):
        for k in {1, 2, 5, 16, 17, 50, 1000, size - 1, size}:
            if 0 < k <= size:
                assert torch.equal(
                    torch.ops.specheads.kth_largest(logits, k), logits.topk(k).values[..., -1:]
                )


@pytest.mark.parametrize("place", [0, 5, 299, 303])
def test_a_row_with_a_nan_has_no_kth_largest(place):
    x = random_tensor(4, 304, dtype=torch.float32)
    x[2, place] = torch.nan
    actual = torch.ops.specheads.kth_largest(x, 5)
    assert actual.isnan().flatten().tolist() == [False, False, True, False]


@pytest.mark.parametrize("k", [0, -1, 8])
def test_a_kth_largest_that_does_not_exist_is_refused(k):
    with pytest.raises(RuntimeError, match=f"k is {k} of 7"):
        torch.ops.specheads.kth_largest(torch.zeros(3, 7), k)


def test_no_rows_have_no_kth_largest():
    assert torch.ops.specheads.kth_largest(torch.zeros(0, 7), 3).shape == (0, 1)


@pytest.mark.parametrize(
    "warp", [Warp(top_k=5), Warp(temperature=0.7, top_k=50, top_p=0.9), Warp(top_k=304)], ids=str
)
def test_a_warp_by_the_operator_is_the_same(warp):
    logits = random_tensor(3, 304).round(decimals=1)  # with ties
    with computing(operations := CpuOperations()):
        assert active() is operations
        actual = warp(logits)
    assert torch.equal(actual, warp(logits)) and active() is not operations


def test_every_operator_is_a_c_function_and_is_declared_for_the_compiler():
    declared = declarations()
    library = ctypes.CDLL(None)
    for name in _RESULTS:
        (declaration,) = declared[f"specheads.{name}.default"]
        assert declaration.startswith(f"AOTITorchError (*aoti_torch_cpu_{name})(AtenTensorHandle ")
        assert hasattr(library, f"aoti_torch_cpu_{name}")
        assert getattr(torch.ops.specheads, name).default in declared
    assert torch.ops.aten.add.Tensor not in declared
    assert pickle.loads(pickle.dumps(declared)) == declared
    sources = "".join("".join(path.read_text() for path in _FOLDER.glob("*.h")).split())
    for name in _RESULTS:
        (declaration,) = declared[f"specheads.{name}.default"]
        arguments = (
            declaration.split("(", 2)[2]
            .removesuffix(", AtenTensorHandle* result)")
            .replace("AtenTensorHandle* ", "consttensor*")
        )
        expected = (
            arguments.replace("AtenTensorHandle ", "consttensor&")
            .replace(" ", "")
            .replace("tensor", "at::TensorBase")
        )
        assert (
            f"AtenTensorHandle{name}({expected}){{" in sources
            and f"SPECHEADS_OPERATOR({name}," in sources
        )
