"""Prompts with their ids and groups, how many each split gets, and the protocol of all sources of prompts."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specheads.errors import UserError, is_count

SPLITS = ("train", "dev", "test")  # those that data is generated for
FINAL = "final"  # prompts on which nothing is chosen: each is read once, for a figure that is published


@dataclass(frozen=True)
class Prompt:
    """One prompt: `text` goes through the pair's chat template, if it has one; `prompt_id` is stable across runs.

    `response` is the response in the data set, if there is one and it was requested. Responses to prompts of one `group` resemble
    each other, for example because the prompts come from one source file; None: no group. No id and no cache depends on it.
    """

    prompt_id: str
    split: str
    text: str
    response: str | None = None
    group: str | None = None


class PromptSource(Protocol):
    """Where prompts come from."""

    def check(self) -> None:
        """Raise UserError for mistakes that show before data is read."""

    def load(self, chats: bool, responses: bool = False) -> Iterable[Prompt]:
        """Return the prompts, for a pair that takes instructions (`chats`) or for one that continues a text.

        With `responses`, prompts have the response in the data set, if there is one.
        """


@dataclass(frozen=True)
class LoadedPrompts:
    """Prompts that another source has loaded."""

    prompts: Sequence[Prompt]

    def check(self) -> None:
        """Accept them: the other source has checked them."""

    def load(self, chats: bool, responses: bool = False) -> Sequence[Prompt]:
        """Return them as they are."""
        return self.prompts


def unique(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts without repeated ids; a text stays in the first split that has it."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.prompt_id, prompt)
    return list(first.values())


def groups_of(prompts: Iterable[Prompt]) -> list[str]:
    """Return the group of each prompt; a prompt without a group forms a group alone."""
    return [prompt.group or prompt.prompt_id for prompt in prompts]


def text_id(text: str) -> str:
    """Return the id of a prompt with this text: 64 bits of its hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ids_hash(prompt_ids: Iterable[str]) -> str:
    """Return a key of a set of prompts, in whatever order: 64 bits of the hash of their ids."""
    return hashlib.sha256(" ".join(sorted(prompt_ids)).encode()).hexdigest()[:16]


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
