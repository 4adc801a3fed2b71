"""What a part of the theory report holds: tables, curves and claims that were checked."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specheads.papers.claims import CheckedClaim


@dataclass(frozen=True)
class Line:
    """A line of a figure."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Figure:
    """Lines over common axes."""

    x: str
    y: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Section:
    """One subject: a table, whose values are text or numbers, a figure or none, and claims."""

    key: str
    title: str
    source: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    claims: Sequence[CheckedClaim]
    figure: Figure | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the section as a JSON object."""
        return asdict(self)
