"""The claims of the papers' theory, by enumeration, simulation or linear programmes."""

from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from benchmarks.papers import rejections, rounds, stopping
from benchmarks.papers.measures import Answer, CheckedClaim

TEXTS = Path(__file__).with_name("theory.yaml")
OUTCOMES = {True: "held", None: "held weakly", False: "did not hold"}
SUBJECTS: tuple[Callable[[torch.Generator], list[Answer]], ...] = (
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
    texts = yaml.safe_load(TEXTS.read_text())
    found = []
    for subject in SUBJECTS:
        for answer in subject(torch.Generator().manual_seed(0)):
            text = texts[answer.name]
            claim = CheckedClaim(
                text["claims"],
                text["says"],
                answer.ours,
                text["published"],
                OUTCOMES[answer.holds],
                answer.ratio,
                answer.why or text.get("why", ""),
            )
            found.append(claim)
    return found
