"""Claims of papers next to what is computed or measured here, whether they held, and the sections of the theory's report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["held", "held weakly", "did not hold"]


@dataclass(frozen=True)
class CheckedClaim:
    """A claim, with our value and the published one as text, their ratio where both are numbers, and whether it held.

    It held weakly where its direction is right, but an interval includes the opposite.
    """

    claims: tuple[str, ...]  # ids of the items in benchmarks/papers.yaml that it answers
    says: str
    ours: str
    published: str | None
    outcome: Outcome
    ratio: float | None = None  # ours over the published value
    why: str = ""  # what else to know; needed where it did not hold


def direction(low: float, value: float, high: float, expected: Literal["more", "less"], neutral: float) -> Outcome:
    """Return whether a value with its 95 % interval lies on the expected side of `neutral`, a ratio's 1 or a difference's 0."""
    if expected == "less":
        low, value, high, neutral = -high, -value, -low, -neutral
    if low > neutral:
        return "held"
    return "held weakly" if value > neutral else "did not hold"


def computed(claims: tuple[str, ...], says: str, ours: str, published: str | None, holds: bool, why: str = "") -> CheckedClaim:
    """Return a claim that holds or does not."""
    return CheckedClaim(claims, says, ours, published, "held" if holds else "did not hold", why=why)


def equality(
    claims: tuple[str, ...], says: str, error: float, most: float, published: str = "equality", why: str = ""
) -> CheckedClaim:
    """Return a claim that two numbers are equal: held if they differ by at most `most`, the precision they are computed with."""
    return computed(claims, says, f"equal within {error:.0e}", published, error <= most, why)


@dataclass(frozen=True)
class ReportSection:
    """One subject of the theory: a table, whose values are text or numbers, and claims."""

    key: str
    title: str
    source: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    claims: Sequence[CheckedClaim]
    note: str = ""
