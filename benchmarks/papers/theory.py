"""The claims of the papers' theory, by enumeration, simulation or linear programmes."""

from collections.abc import Callable

import torch

from benchmarks.papers import rejections, rounds, stopping
from benchmarks.papers.measures import CheckedClaim

Generator = torch.Generator
SUBJECTS: tuple[Callable[[Generator], list[CheckedClaim]], ...] = (
    rejections.simulation,
    rejections.batch_improvement,
    rejections.unbiased,
    rejections.lower_bound,
    rejections.biased_rules,
    rounds.worked_example,
    rounds.verification_rules,
    rounds.joint_choice,
    stopping.thresholds,
    stopping.greedy_oracle,
)


def claims() -> list[CheckedClaim]:
    """Return all claims; each subject has the same seed, so that none depends on another."""
    found = []
    for subject in SUBJECTS:
        found += subject(Generator().manual_seed(0))
    return found
