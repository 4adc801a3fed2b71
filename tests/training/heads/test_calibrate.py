"""How well a calibration does on prompts that it was not fitted on."""

import pytest
import torch

from specheads.heads.calibration import NUM_INDICES, IndexCalibration
from specheads.training.heads.calibrate import cross_fitted_error, error_in_rounds

NUM_PROMPTS, NUM_TOKENS = 40, 100


def noise(seed=0, spread=0.3):
    """Return random logits, acceptances, largest indices and prompts, which differ in their acceptance rates."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.arange(NUM_PROMPTS).repeat_interleave(NUM_TOKENS)
    rate = 0.5 + spread * (2 * torch.rand(NUM_PROMPTS, generator=generator) - 1)
    accepted = torch.rand(len(prompt), generator=generator) < rate[prompt]
    logits = torch.randn(len(prompt), generator=generator, dtype=torch.float64)
    return logits, accepted, torch.randint(12, (len(prompt),), generator=generator), prompt


@pytest.mark.parametrize("seed", range(5))
def test_a_head_that_is_noise_looks_calibrated_on_its_own_prompts_alone(seed):
    *tokens, prompt = noise(seed)
    raw, within = (error_in_rounds(each, *tokens) for each in (IndexCalibration.neutral(), IndexCalibration.fit(*tokens)))
    assert within < 0.03 and raw > 0.15
    assert within < cross_fitted_error(*tokens, prompt, NUM_PROMPTS) < raw


def test_opposite_errors_of_the_halves_do_not_cancel():
    """Even prompts accept 6 of 10 tokens, odd ones 4: the calibration of one half is 0.2 too high or too low on the other."""
    logits, _, furthest, prompt = noise()
    place = torch.arange(len(prompt)) % 10
    accepted = torch.where(prompt % 2 == 0, place < 6, place < 4)
    tokens = torch.zeros_like(logits), accepted, torch.zeros_like(furthest)
    # The prior counts for half of the 2000 tokens: of all tokens, on the head's 0.5, and of those at an index, on all tokens.
    fitted = (0.6 + 0.5 * (0.6 + 0.5 * 0.5) / 1.5) / 1.5
    assert cross_fitted_error(*tokens, prompt, NUM_PROMPTS) == pytest.approx(fitted - 0.4, abs=1e-6)
    assert error_in_rounds(IndexCalibration.fit(*tokens), *tokens) == pytest.approx(0, abs=1e-6)


def test_no_prompt_is_on_both_sides(monkeypatch):
    """Logits are numbers of prompts here."""
    _, accepted, furthest, prompt = noise()
    fitted, measured = [], []

    def fit(logits, *rest):
        fitted.append(set(logits.tolist()))
        return lambda logits, index: measured.append(set(logits.tolist())) or logits / NUM_PROMPTS

    monkeypatch.setattr(IndexCalibration, "fit", fit)
    cross_fitted_error(prompt.double(), accepted, furthest, prompt, NUM_PROMPTS)
    for first, other in zip(fitted, measured, strict=True):
        assert len(first) == len(other) == NUM_PROMPTS // 2 and not first & other
    assert fitted == measured[::-1]


def test_prompts_of_a_group_are_on_one_side(monkeypatch):
    """A prompt's number is its logit; each file has five prompts in a row."""
    _, accepted, furthest, prompt = noise()
    fitted = []
    monkeypatch.setattr(IndexCalibration, "fit", lambda logits, *rest: fitted.append(logits) or (lambda logit, index: logit))
    files = [f"file{number // 5}.py" for number in range(NUM_PROMPTS)]
    cross_fitted_error(prompt.double(), accepted, furthest, prompt, files)
    sides = [{files[int(number)] for number in side.unique()} for side in fitted]
    assert not sides[0] & sides[1] and len(sides[0]) == len(sides[1]) == len(set(files)) // 2


def test_halves_count_by_their_tokens_and_may_be_empty():
    *tokens, prompt = noise()
    first = [part[prompt == 0] for part in tokens]
    assert cross_fitted_error(*first, prompt[prompt == 0], 1) == error_in_rounds(IndexCalibration.neutral(), *first)
    some = (prompt % 2 == 0) | (prompt == 1)
    parts = [part[some] for part in tokens]
    even = prompt[some] % 2 == 0
    here, there = ([part[side] for part in parts] for side in (even, ~even))
    sizes = [int((side[2] + 1).clamp_max(NUM_INDICES).sum()) for side in (here, there)]
    errors = [error_in_rounds(IndexCalibration.fit(*there), *here), error_in_rounds(IndexCalibration.fit(*here), *there)]
    expected = sum(size * error for size, error in zip(sizes, errors, strict=True)) / sum(sizes)
    assert cross_fitted_error(*parts, prompt[some], NUM_PROMPTS) == pytest.approx(expected)
