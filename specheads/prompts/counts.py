"""How many prompts each split gets."""

from collections.abc import Sequence

from specheads.errors import UserError, is_count


def check_counts(num_train: int, num_dev: int, num_test: int, num_final: int) -> None:
    """Raise UserError unless these are counts, and not all of them 0."""
    counts = {"data.num_train": num_train, "data.num_dev": num_dev, "data.num_test": num_test}
    for key, count in (counts | {"data.num_final": num_final}).items():
        if not is_count(count):
            raise UserError(f"{key}={count} must be a non-negative integer; it is a number of prompts.")
    if not any(counts.values()) and not num_final:
        raise UserError(f"{', '.join(counts)} are all 0, so there would be no prompts; ask for some.")


def scaled_down(counts: Sequence[int], available: int) -> list[int]:
    """Return counts in the proportions of `counts`, with the sum `available`, which is less than the sum of `counts`.

    By largest remainder, except that no count that was asked for falls to 0 while `available` allows.
    """
    total = sum(counts)
    scaled = [max(count * available // total, min(count, 1)) for count in counts]
    while sum(scaled) < available:
        scaled[max(range(len(counts)), key=lambda i: counts[i] * available - scaled[i] * total)] += 1
    while sum(scaled) > available:  # what keeps others from 0 comes from the largest, at a tie from the last
        scaled[max(reversed(range(len(counts))), key=scaled.__getitem__)] -= 1
    return scaled
