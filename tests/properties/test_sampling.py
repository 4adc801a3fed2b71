"""Logits to probabilities to tokens: distributions are what the warp says, and tokens have their
share of uniform numbers.
"""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from properties.strategies import probabilities, temperatures, tries
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specheads import UserError, Warp
from specheads.pair.sampling import Uniforms, accept_prob, overlap, sample, tokens_at
from specheads.pair.warp import LEAST

dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
logit = st.sampled_from([-1e4, -30.0, 0.0, 1.0, 30.0, 1e4]) | st.floats(-50, 50)


@st.composite
def logits(draw, least=1, most=8):
    width = draw(st.integers(least, most))
    rows = draw(st.lists(st.lists(logit, min_size=width, max_size=width), min_size=1, max_size=3))
    return torch.tensor(rows, dtype=torch.float64).to(draw(dtypes))


weights = st.lists(
    st.sampled_from([0.0, 1e-300, 1e-12, 1.0, 1e6]) | st.floats(0, 10), min_size=1, max_size=8
).filter(lambda row: sum(row) > 0)


@tries(10)
@given(logits(), temperatures | st.floats(0), st.integers(0, 9), probabilities(0, exclude_min=True))
# These logits were divided to infinity, and NaN.
@example(torch.tensor([[0.0, 30.0]]), 1e-40, 0, 1.0)
@example(torch.tensor([[0.0, -torch.inf]]), float("inf"), 0, 1.0)
# Which is 0 in float32, so that no token was kept.
@example(torch.tensor([[0.0, 1.0]]), 1.0, 0, 1e-50)
def test_whatever_warp_is_allowed_makes_distributions(rows, temperature, top_k, top_p):
    if (temperature and not LEAST <= temperature <= 1 / LEAST) or top_p < LEAST:
        with pytest.raises(UserError, match="^(temperature|top_p)="):
            Warp(temperature, top_k, top_p)
        return
    warp = Warp(temperature, top_k, top_p)
    probs = warp(rows)
    assert probs.dtype == (torch.float64 if rows.dtype == torch.float64 else torch.float32)
    assert (probs >= 0).all() and torch.allclose(
        probs.sum(dim=-1), torch.ones(len(probs), dtype=probs.dtype), atol=1e-5
    )
    kept = probs > 0
    scores = rows.double() / (temperature or 1)
    for row, score in zip(kept, scores, strict=True):
        assert row.any() and score[row].min() >= score[~row].max() - 1e-5 if not row.all() else True
    if warp.greedy:
        assert (
            torch.equal(probs.argmax(dim=-1), rows.argmax(dim=-1)) and (kept.sum(dim=-1) == 1).all()
        )
    elif 0 < top_k < rows.shape[1]:  # of equal logits all are kept
        equal = scores >= scores.topk(top_k).values[:, -1:] - 1e-5
        assert (kept.sum(dim=-1) <= equal.sum(dim=-1)).all()


@tries(3)
@given(logits(2), st.floats(0.2, 4), st.integers(0, 9), probabilities(0.01), probabilities())
def test_a_warp_is_that_of_transformers(rows, temperature, top_k, top_p, min_p):
    # No ties, of which the two keep different ones.
    rows = rows.double() + 1e-3 * torch.arange(rows.shape[1])
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(min(top_k, rows.shape[1])))
    expected = warpers(None, rows.clone()).softmax(-1)
    if top_p < 1:
        mass = expected.sort(dim=-1, descending=True).values.cumsum(dim=-1)
        if (mass - top_p).abs().min() < 1e-9:
            return  # rounding decides whether a token is kept
        warpers.append(TopPLogitsWarper(top_p))
        expected = warpers(None, rows.clone()).softmax(-1)
    if (expected - min_p * expected.amax(dim=-1, keepdim=True)).abs().min() < 1e-9:
        min_p = 0.0  # rounding decides here, too
    warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(None, rows.clone()).softmax(-1)
    torch.testing.assert_close(
        Warp(temperature, top_k, top_p, min_p)(rows), expected, atol=1e-12, rtol=0
    )


@tries(10)
@given(
    weights,
    st.lists(
        st.sampled_from([0.0, 1 - 2**-53, 0.5]) | probabilities(0, 1, exclude_max=True),
        min_size=1,
        max_size=5,
    ),
    dtypes,
)
def test_every_token_has_its_share_of_the_numbers(row, numbers, dtype):
    probs = torch.tensor(row, dtype=torch.float64).to(dtype)
    uniform = torch.tensor(numbers, dtype=torch.float64)
    if not probs.sum() > 0:
        return
    tokens = sample(probs.expand(len(numbers), -1), uniform)
    wide = probs.double() if dtype == torch.float64 else probs.float().double()
    assert (wide[tokens] > 0).all()
    assert torch.equal(tokens, tokens_at(wide, uniform))
    ends = wide.cumsum(0) / wide.sum()
    for token, number in zip(tokens.tolist(), numbers, strict=True):
        assert ends[token] - wide[token] / wide.sum() - 1e-12 <= number <= ends[token] + 1e-12


@tries(5)
@given(weights, st.data())
def test_the_overlap_is_the_expected_acceptance(row, data):
    target = torch.tensor(row, dtype=torch.float64)
    draft = torch.tensor(
        data.draw(
            weights.map(lambda other: (other * 8)[: len(row)]).filter(lambda other: sum(other) > 0)
        ),
        dtype=torch.float64,
    )
    target = target / target.sum()
    draft = draft / draft.sum()
    passes = accept_prob(target, draft)
    assert ((passes >= 0) & (passes <= 1)).all() and (passes[draft == 0] == 0).all()
    expected = (draft * passes).sum()
    torch.testing.assert_close(overlap(target, draft), expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(1 - (target - draft).abs().sum() / 2, expected, atol=1e-9, rtol=0)


@tries(5)
@given(
    st.lists(st.tuples(st.sampled_from([1, 1, 2, 3, 7, 1000, 2000]), st.booleans()), max_size=12),
    st.integers(0, 99),
)
def test_a_stream_of_numbers_does_not_depend_on_how_it_is_taken(takes, seed):
    """Within a block: numbers that are given back are returned again."""
    stream = Uniforms(torch.device("cpu"), seed, 1)
    single = Uniforms(torch.device("cpu"), seed, 1)
    for count, again in takes:
        first = stream.take(count)
        assert first.shape == (count,) and ((first >= 0) & (first < 1)).all()
        if again:
            stream.give_back(count)
            assert torch.equal(stream.take(count), first)
    if takes and sum(count for count, _ in takes) <= Uniforms.BLOCK:
        total = sum(count for count, _ in takes)
        assert torch.equal(first[-1:], single.take(total)[-1:])
