"""Arguments of rules and drafting methods: each mistake raises one UserError with the value and what was expected.

A rule that is a dataclass has `argument` fields, which `check_arguments` checks.
"""

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Any

from specheads.errors import UserError, is_count, is_number

Check = Callable[..., None]  # of a name, a value, and what it is, with an example


def argument(default: Any, meaning: str, *checks: Check) -> Any:
    """Return a field of a dataclass whose value must pass `checks`."""
    return field(default=default, metadata={"checks": checks, "meaning": meaning})


def check_arguments(rule: object) -> None:
    """Raise UserError for a field of a dataclass that does not pass its checks; other objects have none."""
    for name, each in getattr(rule, "__dataclass_fields__", {}).items():
        for check in each.metadata.get("checks", ()):
            check(name, getattr(rule, name), each.metadata["meaning"])


def _require(holds: bool, name: str, value: object, expected: str, meaning: str) -> None:
    if not holds:
        raise UserError(f"{name}={value} must be {expected}{'; it is ' if meaning else ''}{meaning}.")


def _number(expected: str, holds: Callable[[float], bool]) -> Check:
    """Return a check of a finite number."""

    def check(name: str, value: object, meaning: str = "") -> None:
        _require(is_number(value) and abs(value) != float("inf") and holds(value), name, value, expected, meaning)

    return check


check_probability = _number("between 0 and 1", lambda value: 0 <= value <= 1)
check_positive = _number("a positive number", lambda value: value > 0)
check_not_negative = _number("a number of at least 0", lambda value: value >= 0)
check_finite = _number("a finite number", lambda value: True)


def check_count(name: str, value: object, meaning: str = "", least: int = 0) -> None:
    """Raise UserError unless `value` is an integer of at least `least`."""
    expected = {0: "a non-negative integer", 1: "a positive integer"}.get(least, f"an integer of at least {least}")
    _require(is_count(value, least), name, value, expected, meaning)


check_positive_count = partial(check_count, least=1)


def check_flag(name: str, value: object, meaning: str = "") -> None:
    """Raise UserError unless `value` is a bool."""
    _require(isinstance(value, bool), name, value, "true or false", meaning)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise UserError unless `value` is one of `choices`."""
    _require(value in choices, name, value, f"one of {', '.join(choices)}", "")
