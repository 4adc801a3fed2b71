"""Where the prompts of an evaluation come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from specheads.errors import UserError
from specheads.pair.pair import Pair
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.encoding import ResponseLimits
from specheads.prompts.prompt import FINAL, Prompt, PromptSource, unique


class ReportedSource(PromptSource, Protocol):
    """A source of prompts that can be reported on."""

    def check_final(self) -> None:
        """Raise UserError unless final prompts are asked for."""

    def provenance(self) -> Mapping[str, str]:
        """Return everything that decides the prompts except the keys of data."""


@dataclass(frozen=True)
class PromptData:
    """The prompts of dev, test and final splits, and their name in reports; without a name it is that of the pair."""

    source: ReportedSource
    limits: ResponseLimits = field(default_factory=ResponseLimits)  # that of responses is max_new_tokens of the settings
    name: str | None = None

    @property
    def score(self) -> str | None:
        """The name of the score by which responses are compared with those of the data set, if there is one."""
        return getattr(self.source, "score", None)

    def check(self, split: str) -> None:
        """Raise UserError for mistakes that show before prompts are read."""
        self.source.check()
        if split == FINAL:
            self.source.check_final()


@dataclass(frozen=True)
class TestSet:
    """More prompts to report on: the test split of a source, or the rows of a file in order (`is_file`), of any split."""

    source: ReportedSource
    is_file: bool = False

    __test__ = False  # pytest must not collect it

    def load(self, name: str, pair: Pair, count: int) -> list[Prompt]:
        """Return the test prompts, of a file `count`; raises UserError if there are none."""
        if not self.is_file:
            return split_of(self.source, pair, "test", f"give a file: test_sets={{{name}: <file>}}")
        assert isinstance(self.source, DatasetSource)  # of `file_source`
        return split_of(replace(self.source, num_test=count), pair, "test", "give a file with more rows")


def file_source(source: DatasetSource, path: str, count: int) -> TestSet:
    """Return the first `count` rows of a file as test prompts, with the templates of a source."""
    file = replace(source, path=path, revision=None, test_split=None)
    rows = replace(file, num_train=0, num_dev=0, num_test=count, num_final=0)
    return TestSet(rows, is_file=True)


def split_of(source: PromptSource, pair: Pair, split: str, remedy: str, responses: bool = False) -> list[Prompt]:
    """Return the prompts of one split of a source, with `responses` also those in the data set.

    Raises:
        UserError: there are none; the message ends with the remedy.
    """
    loaded = source.load(pair.chats, responses=True) if responses else source.load(pair.chats)
    prompts = [prompt for prompt in unique(loaded) if prompt.split == split]
    if not prompts:
        raise UserError(f"the data set has no {split} prompts; {remedy}.")
    return prompts


def missing_remedy(split: str) -> str:
    """Return the remedy for a split of `data` that has no prompts, or too few."""
    return f"set data.num_{split}, or use a data set with more rows"
