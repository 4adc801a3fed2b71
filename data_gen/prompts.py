"""Where prompts come from: nano's held-out functions, or any data set that `datasets` loads, through a template."""

import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from data_gen.table import Table, check_values
from data_gen.templates import Template
from specheads.errors import UserError, is_count
from specheads.nano import corpus

logger = logging.getLogger(__name__)

SPLITS = ("train", "dev", "test")
DEV_FILES = 0.12  # share of the held-out "dev" files whose prompts are the head's dev set


@dataclass(frozen=True)
class Prompt:
    """One prompt: `text` goes through the pair's chat template where it has one; `prompt_id` is stable across runs.

    `response` is the data set's own, where it was asked for and there is one.
    """

    prompt_id: str
    split: str
    text: str
    response: str | None = None


@dataclass(frozen=True)
class NanoSource:
    """`data=nano`: functions of this machine's standard library that the embedded pair was not trained on.

    Its dev files give the head's train and dev prompts, its test files the test prompts; always split by file.
    """

    num_train: int
    num_dev: int
    num_test: int

    def check(self) -> None:
        """Raise UserError for what is no count, and if there would be no prompts."""
        check_counts(self.num_train, self.num_dev, self.num_test)

    def load(self, chats: bool, responses: bool = False) -> Iterator[Prompt]:
        """Yield up to the wanted number of prompts per split, in an order that looks random but is fixed.

        They are code to go on with, for a pair that chats (`chats`) as for any other. With `responses` each has its function's body.
        """
        self.check()
        wanted = {"train": self.num_train, "dev": self.num_dev, "test": self.num_test}
        found: dict[str, list[Prompt]] = {split: [] for split in SPLITS}
        for side in ("dev", "test"):
            for function in corpus.standard_library(side):
                split = "test" if side == "test" else "dev" if _share(function.source) < DEV_FILES else "train"
                body = function.body if responses else None
                found[split].append(Prompt(_id(function.prompt), split, function.prompt, body))
        for split in SPLITS:
            distinct = {prompt.prompt_id: prompt for prompt in found[split]}
            yield from sorted(distinct.values(), key=lambda prompt: prompt.prompt_id)[: wanted[split]]


@dataclass(frozen=True)
class DatasetSource:
    """`data=alpaca` and the like: rows of a hub data set, a local file or a folder, through a template.

    The first `num_train` prompts are the train prompts, the next the dev prompts, and the next the test prompts unless those
    have a split of their own. The fields are the keys of conf/data/*.yaml, which explain them.
    """

    path: str
    name: str | None
    split: str
    test_split: str | None
    template: str | Sequence[str]
    completion_template: str | Sequence[str] | None
    num_train: int
    num_dev: int
    num_test: int
    response_template: str | Sequence[str] | None = None

    def check(self) -> None:
        """Raise UserError for what can be known to be wrong before data is read."""
        from data_gen import data_set  # imports `datasets`: slow, and nano does without

        check_counts(self.num_train, self.num_dev, self.num_test)
        for chats in (True, False):
            self._template(chats)
        if self.response_template is not None:
            self._response_template()
        data_set.check_path(self.path)
        if not isinstance(self.name, str | None):
            raise UserError(f"data.name={self.name!r} is no text; give the name of a configuration, or null.")
        data_set.check_split("data.split", self.split)
        if self.test_split is not None:
            data_set.check_split("data.test_split", self.test_split)

    def load(self, chats: bool, responses: bool = False) -> list[Prompt]:
        """Return the prompts; short data gives fewer of each split, in proportion.

        Args:
            chats: whether the pair that answers takes instructions; if not, `completion_template` is used where there is one.
            responses: whether to fill in the data set's own, by `response_template`, where a row has one.

        Raises:
            UserError: settings that are wrong, a data set that cannot be loaded, rows that the template does not fit.
        """
        from data_gen import data_set

        self.check()
        tables = data_set.load_tables(self.path, self.name)
        takes = [("data.split", self.split, SPLITS)]
        if self.test_split is not None and not isinstance(tables, Table):
            takes = [("data.split", self.split, SPLITS[:2]), ("data.test_split", self.test_split, SPLITS[2:])]
        prompts = []
        for key, taken, splits in takes:
            counts = {split: getattr(self, f"num_{split}") for split in splits}
            if any(counts.values()):
                rows = data_set.cut(tables, self.path, key, taken)
                answers = self._response_template() if responses else None
                texts = self._texts(rows, self._template(chats), answers, limit=sum(counts.values()))
                names = [split for split, count in self._available(counts, len(texts)).items() for _ in range(count)]
                prompts += [Prompt(_id(text), split, text, own) for split, (text, own) in zip(names, texts, strict=True)]
        return prompts

    def _available(self, counts: dict[str, int], num_texts: int) -> dict[str, int]:
        """Return how many of `num_texts` prompts each split gets: what was asked for, or in its proportions."""
        asked = sum(counts.values())
        if num_texts == asked:
            return counts
        scaled = dict(zip(counts, scaled_down(list(counts.values()), num_texts), strict=True))
        shares = ", ".join(f"{count} {split}" for split, count in scaled.items())
        logger.info("data: %s has %d prompts, not the %d asked for; in proportion: %s", self.path, num_texts, asked, shares)
        return scaled

    def _template(self, chats: bool) -> Template:
        if chats or self.completion_template is None:
            return Template.parse("data.template", self.template)
        return Template.parse("data.completion_template", self.completion_template)

    def _response_template(self) -> Template:
        if self.response_template is None:
            raise UserError(
                "data.response_template=null, but the data set's own responses are asked for; say where they are, for example "
                "'data.response_template=\"{output}\"', or take other samples."
            )
        return Template.parse("data.response_template", self.response_template)

    def _texts(
        self, tables: Sequence[Table], template: Template, answers: Template | None, limit: int
    ) -> list[tuple[str, str | None]]:
        """Return what `template` makes of the first `limit` rows that fit it, or of as many as there are, each with its own response."""
        known = list(dict.fromkeys(field for table in tables for field in table.fields))
        template = template.restricted(known, self.path)
        answers = answers and answers.restricted(known, self.path)
        fields = list(dict.fromkeys([*template.fields, *(answers.fields if answers else [])]))
        texts, num_unfit, seen = [], 0, {}
        for place, row in itertools.chain.from_iterable(table.numbered(fields) for table in tables):
            if len(texts) == limit:
                break
            check_values(row, fields, self.path, place, seen)
            text = template.fill(row)
            if text is None:
                num_unfit += 1
            else:
                texts.append((text, answers.fill(row) if answers else None))
        if num_unfit:
            num_read = num_unfit + len(texts)
            logger.info(
                "data: %d of %d rows of %s left out: no text in fields of %s", num_unfit, num_read, self.path, template.key
            )
        if not texts:
            raise UserError(
                f"data.path={self.path!r} gives no prompt: none of {num_unfit} rows has text in {', '.join(template.fields)}, "
                f"the fields of {template.key}; check it and the split."
            )
        return texts


@dataclass(frozen=True)
class LoadedPrompts:
    """Prompts that another source has given."""

    prompts: Sequence[Prompt]

    def check(self) -> None:
        """Nothing can be wrong with them."""

    def load(self, chats: bool, responses: bool = False) -> Sequence[Prompt]:
        """Return them as they are."""
        return self.prompts


def unique(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts without repeated ids; a text stays in the first split that has it."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.prompt_id, prompt)
    return list(first.values())


def check_counts(num_train: int, num_dev: int, num_test: int) -> None:
    """Raise UserError unless these are counts, and not all of them 0."""
    counts = {"data.num_train": num_train, "data.num_dev": num_dev, "data.num_test": num_test}
    for key, count in counts.items():
        if not is_count(count):
            raise UserError(f"{key}={count} is no count; give a whole number, 0 or more.")
    if not any(counts.values()):
        raise UserError(f"{', '.join(counts)} are all 0, so there would be no prompts; ask for some.")


def scaled_down(counts: Sequence[int], available: int) -> list[int]:
    """Return counts in the proportions of `counts` whose sum is `available`, which is less than theirs.

    By largest remainder, except that nothing that was asked for falls to 0 while `available` allows.
    """
    total = sum(counts)
    scaled = [max(count * available // total, min(count, 1)) for count in counts]
    while sum(scaled) < available:
        scaled[max(range(len(counts)), key=lambda i: counts[i] * available - scaled[i] * total)] += 1
    while sum(scaled) > available:  # what keeps others from 0 comes from the largest, at a tie from the last
        scaled[max(reversed(range(len(counts))), key=scaled.__getitem__)] -= 1
    return scaled


def _id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _share(name: str) -> float:
    return int.from_bytes(hashlib.sha256(b"head " + name.encode()).digest()[:4], "big") / 2**32
