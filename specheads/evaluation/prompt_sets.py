"""The sets of prompts of an evaluation: dev prompts, on which rules are tuned, and others, on which
they are reported.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from specheads.errors import UserError
from specheads.evaluation.settings import Evaluation
from specheads.heads.head import LocatedHead
from specheads.heads.train_prompts import TrainPrompts, text_hash
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

logger = logging.getLogger(__name__)

WHY = "a head learned from them or was calibrated on them, or rules are tuned on them"


@dataclass(frozen=True)
class PromptData:
    """The prompts of dev, test and final splits, and their name in reports.

    Without a name it is that of the pair.
    """

    source: PromptSource
    # A response's limit is max_new_tokens of the settings
    limits: ResponseLimits = field(default_factory=ResponseLimits)
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


@dataclass(frozen=True)
class PromptSet:
    """Prompts in order, with the name and the role that reports give them."""

    name: str
    role: str  # dev: rules are tuned on them; test: they are not
    prompts: Sequence[EncodedPrompt]
    num_left_out: int = 0  # prompts of the same source that heads learned from
    # Everything that decides the prompts except settings
    origin: Mapping[str, str] = field(default_factory=dict)

    def first(self, count: int) -> "PromptSet":
        """Return the first prompts as a set of the same name."""
        return replace(self, prompts=self.prompts[:count])

    @property
    def groups(self) -> list[str]:
        """The group of each prompt; a prompt without a group is a group by itself."""
        return groups_of(prompt for prompt, _ in self.prompts)

    def provenance(self) -> dict[str, object]:
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
        self._learned = dict[str, TrainPrompts]()  # by head
        self._unknown = list[str]()  # remarks on heads whose train prompts are not known
        for name, located in heads.items():
            if located.head.train_prompts is None:
                remark = (
                    f"Head {name} does not name the prompts that it learned from, so none are left"
                    " out of what is reported."
                )
                logger.warning("%s", remark)
                self._unknown.append(remark)
            else:
                self._learned[name] = located.head.train_prompts
        self._used = dict[str, PromptSet]()

    @cached_property
    def dev(self) -> PromptSet:
        """All dev prompts that no head learned from."""
        return self._of_split("dev", f"{self.name}, dev", "dev", self._hashes(calibrated=False))

    @cached_property
    def reported(self) -> PromptSet:
        """All prompts of the split that `split=` names, except those that a head learned from or
        was calibrated on.
        """
        split = self.settings.split
        name = self.name if split == "test" else f"{self.name}, {split}"
        return self._of_split(split, name, "test", self._hashes(calibrated=True))

    @cached_property
    def recorded(self) -> dict[str, PromptSet]:
        """The prompts to record by name: dev prompts, the reported ones, and those of test_sets."""
        dev = self.dev.first(self.settings.num_dev_prompts)
        reported = self.reported.first(self.settings.num_prompts)
        named = {dev.name: dev, reported.name: reported}
        excluded = self._hashes(calibrated=True) | _hashes_of(prompt for prompt, _ in dev.prompts)
        for name, test_set in (self.settings.test_sets or {}).items():
            assert isinstance(test_set, TestSet)
            title = f"{name}, more" if name in (dev.name, reported.name) else name
            named[title] = self._of_test_set(title, name, test_set, excluded)
        self._used |= named
        return named

    @cached_property
    def decoded(self) -> PromptSet:
        """The first reported prompts, which are decoded."""
        decoded = self.reported.first(self.settings.num_live_prompts)
        self._used[f"{decoded.name}, decoded"] = decoded
        return decoded

    def context(self) -> dict[str, object]:
        """Return the description of the prompts for the report: the split, its parts if any, and
        each set's provenance.
        """
        split = self.settings.split
        parts = getattr(self.data.source, "final_parts", []) if split == FINAL else []
        return {
            "split": split,
            "final_parts": list(parts),
            "prompts": {name: used.provenance() for name, used in self._used.items()},
        }

    def notes(self) -> list[str]:
        """Return remarks on the prompts for readers of the report."""
        left_out = dict[str, str]()
        for used in self._used.values():
            if used.num_left_out:
                left_out[used.name] = f"{_counted(used.num_left_out, used.name)} left out: {WHY}."
        return [*left_out.values(), *self._unknown]

    def _of_split(self, split: str, name: str, role: str, excluded: set[int]) -> PromptSet:
        """Return all prompts of one split of the data set that are not `excluded`."""
        key = f"data.num_{split}"
        prompts = self._loaded(self.data.source, split, key)
        return self._without(excluded, name, role, self.data.source, prompts, key)

    def _of_test_set(
        self, title: str, name: str, test_set: TestSet, excluded: set[int]
    ) -> PromptSet:
        """Return the first prompts of one of test_sets that are not `excluded`, as many as settings
        ask for.
        """
        count = self.settings.num_prompts
        source = test_set.source
        key = f"test_sets={{{name}: <file>}}"
        prompts = self._loaded(source, "test", key)
        if test_set.is_file and not excluded.isdisjoint(_hashes_of(prompts)):
            assert isinstance(source, DatasetSource)  # `file_source` made it
            longer = replace(source, num_test=count + len(excluded))
            prompts = self._loaded(longer, "test", key)
        return self._without(excluded, title, "test", source, prompts, key).first(count)

    def _loaded(self, source: PromptSource, split: str, key: str) -> list[Prompt]:
        """Return the prompts of one split of a source.

        Raises UserError, which names the key, if there are none.
        """
        prompts = [each for each in unique(source.load(self.pair.chats)) if each.split == split]
        if not prompts:
            raise UserError(f"the data set has no {split} prompts; give some by {key}.")
        return prompts

    def _without(
        self,
        excluded: set[int],
        name: str,
        role: str,
        source: PromptSource,
        prompts: Sequence[Prompt],
        key: str,
    ) -> PromptSet:
        """Return a set of all `prompts` that are not excluded.

        Raises UserError, which names the key, if that leaves none.
        """
        kept = [prompt for prompt in prompts if text_hash(prompt.text) not in excluded]
        num_left_out = len(prompts) - len(kept)
        if not kept:
            hashes = _hashes_of(prompts)
            heads = list[str]()
            for head, learned in self._learned.items():
                if not hashes.isdisjoint([*learned.train.tolist(), *learned.dev.tolist()]):
                    heads.append(head)
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

    def _hashes(self, calibrated: bool) -> set[int]:
        """Return the hashes of prompts that any head was trained on, or `calibrated` on."""
        hashes = set[int]()
        for learned in self._learned.values():
            hashes.update(learned.train.tolist())
            if calibrated:
                hashes.update(learned.dev.tolist())
        return hashes


def _hashes_of(prompts: Iterable[Prompt]) -> set[int]:
    return {text_hash(prompt.text) for prompt in prompts}


def _counted(number: int, name: str) -> str:
    return f"1 prompt of {name} was" if number == 1 else f"{number} prompts of {name} were"
