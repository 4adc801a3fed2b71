"""Checks of the arguments of rules and drafting methods: each raises one UserError with the value and what was expected."""

from collections.abc import Sequence

from specheads.errors import UserError, is_count, is_number


def check_probability(name: str, value: object, meaning: str) -> None:
    """Raise UserError unless `value` is a number from 0 to 1."""
    if not is_number(value) or not 0 <= value <= 1:
        raise UserError(f"{name}={value} must be between 0 and 1; it is {meaning}.")


def check_positive(name: str, value: object, meaning: str) -> None:
    """Raise UserError unless `value` is a finite number above 0."""
    if not is_number(value) or not 0 < value < float("inf"):
        raise UserError(f"{name}={value} must be a positive number; it is {meaning}.")


def check_not_negative(name: str, value: object, meaning: str) -> None:
    """Raise UserError unless `value` is a finite number of at least 0."""
    if not is_number(value) or not 0 <= value < float("inf"):
        raise UserError(f"{name}={value} must be a number of at least 0; it is {meaning}.")


def check_finite(name: str, value: object, meaning: str) -> None:
    """Raise UserError unless `value` is a finite number."""
    if not is_number(value) or abs(value) == float("inf"):
        raise UserError(f"{name}={value} must be a finite number; it is {meaning}.")


def check_count(name: str, value: object, least: int = 0) -> None:
    """Raise UserError unless `value` is an integer of at least `least`."""
    if not is_count(value, least):
        expected = {0: "a non-negative integer", 1: "a positive integer"}.get(least, f"an integer of at least {least}")
        raise UserError(f"{name}={value} must be {expected}.")


def check_flag(name: str, value: object) -> None:
    """Raise UserError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise UserError(f"{name}={value} must be true or false.")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise UserError unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(f"{name}={value} must be one of {', '.join(choices)}.")
