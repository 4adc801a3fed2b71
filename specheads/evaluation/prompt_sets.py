"""The sets of prompts of an evaluation: dev prompts, on which rules are tuned, and others, of which
nothing is known.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specheads.errors import UserError
from specheads.evaluation.settings import Evaluation
from specheads.heads.head import LocatedHead
from specheads.heads.train_prompts import text_hash
from specheads.pair.pair import Pair
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.prompt import (
    FINAL,
    EncodedPrompt,
    Prompt,
    ResponseLimits,
    encode_prompts,
    groups_of,
    ids_hash,
    unique,
)
from specheads.prompts.sources import PromptSource


@dataclass(frozen=True)
class PromptData:
    """The prompts of dev, test and final splits, and their name in reports.

    Without a name it is that of the pair.
    """

    source: PromptSource
    limits: ResponseLimits = field(
        default_factory=ResponseLimits
    )  # a response's limit is max_new_tokens of the settings
    name: str | None = None

    def check(self, split: str) -> None:
        """Raise UserError for mistakes that show before prompts are read."""
        if split == FINAL:
            self.source.check_final()


@dataclass(frozen=True)
class TestSet:
    """More prompts to report on: the test split of a source, or the rows of a file in order
    (`is_file`), of any split.
    """

    source: PromptSource
    is_file: bool = False

    __test__ = False  # pytest must not collect it


def file_source(source: DatasetSource, path: str, count: int) -> TestSet:
    """Return the first `count` rows of a file as test prompts, with the templates of a source."""
    file = replace(source, path=path, revision=None, test_split=None)
    return TestSet(replace(file, num_train=0, num_dev=0, num_test=count, num_final=0), is_file=True)


logger = logging.getLogger(__name__)

WHY = "a head learned from them or was calibrated on them, or rules are tuned on them"


@dataclass(frozen=True)
class PromptSet:
    """Prompts in order, with the name and the role that reports give them."""

    name: str
    role: str  # dev: rules are tuned on them; test: they are not
    prompts: Sequence[EncodedPrompt]
    num_left_out: int = 0  # prompts of the same source that heads learned from
    origin: Mapping[str, str] = field(
        default_factory=dict
    )  # everything that decides the prompts except settings

    def first(self, count: int) -> "PromptSet":
        """Return the first prompts as a set of the same name."""
        return replace(self, prompts=self.prompts[:count])

    def spread(self, count: int) -> "PromptSet":
        """Return `count` prompts of as many groups as there are: the first of each group, then the
        second of each, and so on.
        """
        members: dict[str, int] = {}
        turns = [members.setdefault(group, -1) for group in self.groups]
        for place, group in enumerate(self.groups):
            members[group] += 1
            turns[place] = members[group]
        order = sorted(range(len(turns)), key=lambda place: turns[place])[:count]
        return replace(self, prompts=[self.prompts[place] for place in order])

    @property
    def groups(self) -> list[str]:
        """The group of each prompt; a prompt without a group is a group by itself."""
        return groups_of(prompt for prompt, _ in self.prompts)

    def provenance(self) -> dict[str, Any]:
        """Return the provenance of the prompts: a hash of their ids, in any order, and their
        number.
        """
        return {
            "role": self.role,
            "num_prompts": len(self.prompts),
            "sha256": ids_hash(prompt.prompt_id for prompt, _ in self.prompts),
            "num_left_out": self.num_left_out,
            **self.origin,
        }


class PromptSets:
    """All sets of prompts of one evaluation of `heads`; each is loaded when it is first needed."""

    def __init__(
        self, data: PromptData, pair: Pair, heads: Mapping[str, LocatedHead], settings: Evaluation
    ) -> None:
        self.data = data
        self.pair = pair
        self.settings = settings
        self.name = data.name or Path(pair.name).stem
        self.learned = {
            name: located.head.train_prompts
            for name, located in heads.items()
            if located.head.train_prompts is not None
        }
        self._silence = [
            f"Head {name} does not name the prompts that it learned from, so none are left out of"
            " what is reported."
            for name in heads
            if name not in self.learned
        ]
        for remark in self._silence:
            logger.warning("%s", remark)
        self._used: dict[str, PromptSet] = {}

    @cached_property
    def dev(self) -> PromptSet:
        """All dev prompts that no head learned from."""
        prompts = self._split(self.data.source, "dev")
        return self._set(
            f"{self.name}, dev",
            "dev",
            self.data.source,
            prompts,
            self._numbers("train"),
            "data.num_dev",
        )

    @cached_property
    def reported(self) -> PromptSet:
        """All prompts of the split that `split=` names, except those that a head learned from or
        was calibrated on.
        """
        split = self.settings.split
        prompts = self._split(self.data.source, split)
        name = self.name if split == "test" else f"{self.name}, {split}"
        return self._set(
            name,
            "test",
            self.data.source,
            prompts,
            self._numbers("train", "dev"),
            f"data.num_{split}",
        )

    @cached_property
    def recorded(self) -> dict[str, PromptSet]:
        """The prompts to record by name: dev prompts, the reported ones, and those of test_sets."""
        sets = [
            self.dev.first(self.settings.num_dev_prompts),
            self.reported.first(self.settings.num_prompts),
        ]
        known = self._numbers("train", "dev") | _numbers_of(prompt for prompt, _ in sets[0].prompts)
        for name, test_set in (self.settings.test_sets or {}).items():
            title = name if name not in [other.name for other in sets] else f"{name}, more"
            sets.append(self._more(title, name, test_set, known))
        named = {prompt_set.name: prompt_set for prompt_set in sets}
        self._used |= named
        return named

    @cached_property
    def decoded(self) -> PromptSet:
        """The first reported prompts, which are decoded."""
        decoded = self.reported.first(self.settings.num_live_prompts)
        self._used[f"{decoded.name}, decoded"] = decoded
        return decoded

    def context(self) -> dict[str, Any]:
        """Return the description of the prompts for the report: the split, its parts if any, and
        each set's provenance.
        """
        parts = (
            list(getattr(self.data.source, "final_parts", []))
            if self.settings.split == FINAL
            else []
        )
        return {
            "split": self.settings.split,
            "final_parts": parts,
            "prompts": {name: used.provenance() for name, used in self._used.items()},
        }

    def notes(self) -> list[str]:
        """Return remarks on the prompts for readers of the report."""
        sets = {used.name: used for used in self._used.values() if used.num_left_out}
        left_out = [
            f"{_counted(reduced.num_left_out, reduced.name)} left out: {WHY}."
            for reduced in sets.values()
        ]
        return left_out + self._silence

    def _split(self, source: PromptSource, split: str, remedy: str | None = None) -> list[Prompt]:
        """Return the prompts of one split of a source.

        Raises UserError, which ends with the remedy, if there are none.
        """
        prompts = [
            prompt for prompt in unique(source.load(self.pair.chats)) if prompt.split == split
        ]
        if not prompts:
            remedy = remedy or f"set data.num_{split}, or use a data set with more rows"
            raise UserError(f"the data set has no {split} prompts; {remedy}.")
        return prompts

    def _more(self, title: str, name: str, test_set: TestSet, known: set[int]) -> PromptSet:
        """Return the first prompts of one of test_sets that are not `known`, as many as settings
        ask for.
        """
        count = self.settings.num_prompts
        source = test_set.source
        key = f"test_sets={{{name}: <file>}}"
        prompts = self._split(
            source,
            "test",
            f"give {'a file with more rows' if test_set.is_file else f'a file: {key}'}",
        )
        if test_set.is_file and not known.isdisjoint(_numbers_of(prompts)):
            assert isinstance(source, DatasetSource)  # `file_source` made it
            prompts = self._split(replace(source, num_test=count + len(known)), "test")
        return self._set(title, "test", source, prompts, known, key).first(count)

    def _set(
        self,
        name: str,
        role: str,
        source: PromptSource,
        prompts: Sequence[Prompt],
        known: set[int],
        key: str,
    ) -> PromptSet:
        """Return a set of all `prompts` that are not `known`.

        Raises UserError, which names the key, if that leaves none.
        """
        kept = [prompt for prompt in prompts if text_hash(prompt.text) not in known]
        num_left_out = len(prompts) - len(kept)
        if not kept:
            numbers = _numbers_of(prompts)
            heads = [
                head
                for head, of_head in self.learned.items()
                if numbers & {*of_head.train.tolist(), *of_head.dev.tolist()}
            ]
            raise UserError(
                f"{name} cannot be reported on: all {num_left_out} of its prompts would be left"
                f" out, because {WHY} (head={', '.join(heads) or None}); give other prompts by"
                f" {key}, or a head that was trained on others."
            )
        if num_left_out:
            logger.info(
                "data: %s left out: %s", _counted(num_left_out, f"{len(prompts)} of {name}"), WHY
            )
        encoded = encode_prompts(self.pair, kept, self.data.limits)
        return PromptSet(name, role, encoded, num_left_out, source.provenance())

    def _numbers(self, *kinds: str) -> set[int]:
        """Return the numbers of prompts that any head was trained on (`train`) or calibrated on
        (`dev`).
        """
        return {
            number
            for learned in self.learned.values()
            for kind in kinds
            for number in getattr(learned, kind).tolist()
        }


def _numbers_of(prompts: Iterable[Prompt]) -> set[int]:
    """Return the numbers that heads know these prompts by."""
    return {text_hash(prompt.text) for prompt in prompts}


def _counted(number: int, name: str) -> str:
    return f"1 prompt of {name} was" if number == 1 else f"{number} prompts of {name} were"
