"""The operators that sampling uses inside compiled steps compute what sampling.py computes."""

import itertools

import pytest
import torch
from fakes import needs_compiler, random_tensor
from torch import nn

from specheads import Warp
from specheads.decoding.engine.compiled_program import CompiledProgram
from specheads.decoding.engine.cpu import CpuOperations
from specheads.pair.sampling import TORCH, computing_with, sample

pytestmark = [needs_compiler, pytest.mark.usefixtures("built_operators")]

operators = torch.ops.specheads
SIZES = [1, 2, 7, 16, 63, 257, 2048, 2051]
DTYPES = [torch.float64, torch.float32]
NEAR = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
}  # of probabilities: their sums are of up to 2,051 rounded numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_softmax_of_kept_logits(size, dtype, threads):
    x = 4 * random_tensor(3, 2, size, dtype=dtype)
    hidden = x.masked_fill(x < x.median(), -torch.inf)
    hidden[..., 0] = 0  # a row without any finite logit has no distribution
    for logits in (x, x.round(), torch.zeros_like(x), x.mT.contiguous().mT, hidden):
        for k in {1, 2, 50, size}:
            if k <= size:
                least = logits.topk(k).values[..., -1:]
                actual = operators.kept_softmax(logits, least)
                expected = TORCH.kept_softmax(logits.double(), least.double())
                torch.testing.assert_close(actual.double(), expected, atol=NEAR[dtype], rtol=0)
                assert torch.equal(
                    actual == 0, TORCH.kept_softmax(logits, least) == 0
                )  # the same ties survive


@pytest.mark.parametrize("size", [1, 5, 16, 300])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_is_nan(size, value):
    logits = torch.zeros(4, size)
    logits[1, size - 1] = value
    logits[2, :] = -torch.inf
    least = operators.kth_largest(logits, 1)
    actual = operators.kept_softmax(logits, least)
    expected = TORCH.kept_softmax(logits, least)
    assert (
        actual.isnan().all(dim=1).tolist()
        == expected.isnan().all(dim=1).tolist()
        == [False, True, True, False]
    )
    assert torch.equal(actual[::3], expected[::3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_p", [1e-3, 0.5, 0.9, 0.999, 1 - 1e-9, 1.0])
def test_the_nucleus(size, top_p, dtype):
    x = random_tensor(3, 2, size, dtype=dtype)
    few = (4 * x).masked_fill(x < x.topk(min(5, size)).values[..., -1:], -torch.inf)
    for logits in (x, 4 * x, (4 * x).round(), torch.zeros_like(x), few, x.mT.contiguous().mT):
        probs = logits.softmax(dim=-1)
        actual = operators.nucleus(probs, top_p)
        expected = TORCH.nucleus(probs, top_p)
        torch.testing.assert_close(actual, expected, atol=NEAR[dtype], rtol=0)
        assert torch.equal(actual == 0, expected == 0)


def test_the_nucleus_of_nan_is_nan():
    probs = torch.tensor([[0.5, 0.3, 0.2], [torch.nan] * 3])
    assert (
        operators.nucleus(probs, 0.6).isnan().tolist()
        == TORCH.nucleus(probs, 0.6).isnan().tolist()
        == [[False] * 3, [True] * 3]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_most_likely_token(size, dtype, threads):
    x = random_tensor(3, 2, size, dtype=dtype)
    nan = x.clone()
    infinite = x.clone()
    nan[1, :, size // 2 :] = torch.nan
    infinite[0, 1, -1] = torch.inf
    infinite[1] = -torch.inf
    for rows in (x, x.round(), torch.zeros_like(x), x.mT.contiguous().mT, nan, infinite):
        assert torch.equal(operators.most_likely(rows), rows.argmax(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_token_at_a_uniform_number(size, dtype, threads):
    weights = random_tensor(40, size, dtype=dtype).exp()
    uniform = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    uniform[:4] = torch.tensor([0.0, 0.5, 1 - 2**-53, 1 - 2**-53])
    few = weights.where(weights >= weights.topk(min(5, size)).values[:, -1:], 0)
    none = torch.zeros_like(weights)
    point = none.scatter(1, (weights.argsort() == 0).long().argmax(dim=1, keepdim=True), 1e-30)
    for probs in (
        weights,
        weights / weights.sum(dim=1, keepdim=True),
        few,
        point,
        none,
        weights.mT.contiguous().mT,
    ):
        assert torch.equal(operators.token_at(probs, uniform), TORCH.token_at(probs, uniform))


def test_the_operators_of_no_rows_return_none():
    rows = torch.zeros(0, 7)
    assert (
        operators.kept_softmax(rows, rows[:, :1]).shape
        == operators.nucleus(rows, 0.5).shape
        == (0, 7)
    )
    assert (
        operators.most_likely(rows).shape
        == operators.token_at(rows, rows[:, 0].double()).shape
        == (0,)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: operators.kept_softmax(x.half(), x.half()[:, :1]), "no operator for Half"),
        (lambda x: operators.kept_softmax(x, x), "bounds are Float"),
        (lambda x: operators.kept_softmax(x, x[:, :1].double()), "bounds are Double"),
        (lambda x: operators.nucleus(x.half(), 0.5), "no operator for Half"),
        (lambda x: operators.nucleus(x, 0.0), "top_p is 0"),
        (lambda x: operators.nucleus(x, 1.5), "top_p is 1.5"),
        (lambda x: operators.most_likely(x.long()), "no operator for Long"),
        (lambda x: operators.most_likely(x[:, :0]), "no number"),
        (lambda x: operators.token_at(x, x[:, 0]), "uniform numbers are Float"),
        (lambda x: operators.token_at(x, x[:1, 0].double()), "uniform numbers are Double"),
    ],
)
def test_other_tensors_are_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.zeros(3, 7))


class Sampling(nn.Module):
    def __init__(self, warp):
        super().__init__()
        self.warp = warp

    def forward(self, logits, uniform, places, inputs):
        with computing_with(CpuOperations()):
            probs = self.warp(logits)
            return probs, self.warp.draw(probs, uniform), sample(probs, uniform)


def cases():
    """Warps and types that are compiled: three in every run, as each takes three seconds."""
    always = [
        (Warp(0.7, 50, 0.9, 0.02), torch.bfloat16),
        (Warp(top_p=0.5), torch.float64),
        (Warp(temperature=0), torch.float64),
    ]
    warps = [Warp(top_k=5), Warp(0.7, 50, 0.9, 0.02), Warp(top_p=0.5), Warp(temperature=0)]
    for case in itertools.product(warps, [torch.float64, torch.bfloat16]):
        yield pytest.param(*case, marks=[] if case in always else pytest.mark.full)


@pytest.mark.parametrize(("warp", "dtype"), list(cases()), ids=str)
def test_compiled_sampling_is_that_of_the_warp(warp, dtype):
    logits = random_tensor(6, 304).round(decimals=1).to(dtype)  # with ties
    uniform = torch.rand(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    args = logits, uniform, torch.zeros(3), ()
    compiled_program = CompiledProgram.compile(Sampling(warp), args, {}, {"cpp_wrapper": True})
    probs, token, sampled = compiled_program.bind(Sampling(warp), [])(*args)
    expected = warp(logits)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=0)
    assert torch.equal(probs == 0, expected == 0)
    assert torch.equal(token, warp.draw(expected, uniform)) and torch.equal(
        sampled, sample(expected, uniform)
    )
