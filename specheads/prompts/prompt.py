"""A prompt, its id and its group, and the protocol of all sources of prompts."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
