"""A test of counts against a distribution; each caller states its false-alarm probability."""

import torch
from torch import Tensor


def chi_square_p_value(counts: Tensor, probs: Tensor, min_expected: float = 8.0) -> float:
    """Return the p-value of `counts` (N,) under the distribution `probs` (N,).

    Rare outcomes are pooled until each cell expects `min_expected` or more. An outcome of
    probability zero that occurred gives 0.
    """
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    total = counts.sum().double()
    order = probs.argsort()
    cells = []
    observed = 0.0
    expected = 0.0
    for index in order.tolist():
        observed += counts[index].item()
        expected += (probs[index] * total).item()
        if expected >= min_expected:
            cells.append((observed, expected))
            observed = expected = 0.0
    cells[-1] = (cells[-1][0] + observed, cells[-1][1] + expected)
    assert len(cells) > 1, "too few samples for a test"
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def uniforms(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return float64 uniform numbers in [0, 1)."""
    return torch.rand(shape, generator=generator, dtype=torch.float64)
