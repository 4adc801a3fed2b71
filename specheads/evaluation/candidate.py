"""One rule with its numbers, as it decodes and as it is replayed, and the families that every evaluation has."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from specheads.decoding.stopping import StoppingRule
from specheads.errors import is_number

FIXED, CEILING, ORACLE = "fixed_length", "ceiling", "oracle"
TARGET, LOAD_AWARE = "target", "load-aware"  # of batches besides


@dataclass(frozen=True)
class RuleChoice:
    """A class of stopping rules and its arguments; a list holds the values to try."""

    cls: type[StoppingRule]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RuleFields:
    """What kind of rule a candidate or a result is of: families and names are titles for readers, and decide nothing."""

    rule_name: str = ""  # that of its config; empty for what has none
    head: str | None = None  # the name of its head
    automatic: bool = False  # whether a value was chosen as `auto`
    bound: bool = False  # whether it uses knowledge that no decoder has


def rule_fields(rule: RuleFields) -> dict[str, Any]:
    """Return the values of RuleFields, to make another one with them."""
    return {field.name: getattr(rule, field.name) for field in fields(RuleFields)}


@dataclass(frozen=True)
class Candidate(RuleFields):
    """One rule with its numbers.

    `live` is None for a bound that no decoder can reach; `ratio` is None for a rule that suits all ratios.
    """

    family: str
    name: str
    rule: StoppingRule  # as it is replayed
    live: StoppingRule | None  # as it decodes; None for a bound that no decoder can reach
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ratio: str | None = None  # the cost ratio that it was fitted to; None: it suits all

    @property
    def value(self) -> float | None:
        """The first of the parameters that are numbers, for plots."""
        return next((value for value in self.parameters.values() if is_number(value)), None)

    @property
    def kind(self) -> str:
        """The kind of rule that decides its cost: its class, and its head."""
        return kind_of(self.rule, self.head)


def kind_of(rule: StoppingRule | None, head: str | None) -> str:
    """Return the name of a kind of rule; None: of decoding without a draft."""
    return type(rule).__name__ + (f" of {head}" if head else "")
