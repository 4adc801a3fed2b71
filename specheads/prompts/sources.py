"""Where prompts come from: nano's held-out functions, or any data set that `datasets` loads, through a template."""

import hashlib
import itertools
import logging
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specheads.errors import UserError, is_count
from specheads.nano import corpus
from specheads.prompts.table import Table, check_values
from specheads.prompts.templates import Template

logger = logging.getLogger(__name__)

SPLITS = ("train", "dev", "test")  # those that data is generated for
FINAL = "final"  # prompts that nothing is chosen on: each is read once, for a figure that is published
DEV_FILES = 0.12  # share of the held-out "dev" files whose prompts are the head's dev set

# Test prompts of nano that recipes were compared on: data.num_test is no more, and the final split begins after them.
NUM_READ = 300
FINAL_PER_FILE = 30  # final prompts of one file at most: a few files have hundreds of functions, which resemble each other
NUM_PARTS = 10


@dataclass(frozen=True)
class Prompt:
    """One prompt: `text` goes through the pair's chat template where it has one; `prompt_id` is stable across runs.

    `response` is the data set's own, where it was asked for and there is one. `group` names what prompts have in common that makes their
    responses alike, such as a source file; None: nothing. No id or cache depends on it.
    """

    prompt_id: str
    split: str
    text: str
    response: str | None = None
    group: str | None = None


class PromptSource(Protocol):
    """Where prompts come from."""

    def check(self) -> None:
        """Raise UserError for what can be known to be wrong before data is read."""

    def load(self, chats: bool, responses: bool = False) -> Iterable[Prompt]:
        """Return the prompts, for a pair that takes instructions (`chats`) or for one that goes on with a text.

        With `responses` they bring the data set's own, where it has one.
        """


@dataclass(frozen=True)
class NanoSource:
    """`data=nano`: functions of this machine's standard library that the embedded pair was not trained on.

    Its dev files give the head's train and dev prompts, its test files the test prompts; always split by file. The final split is what the
    test files hold after the first NUM_READ prompts, in NUM_PARTS parts: `final_part` names those that are asked for, one or a list, and
    `num_final` limits their prompts. A prompt is in the same part whatever else the library holds, so that parts mean nearly the same
    under every Python version.
    """

    num_train: int
    num_dev: int
    num_test: int
    num_final: int | None = None
    final_part: int | Sequence[int] | None = None

    def check(self) -> None:
        """Raise UserError for what is no count or part, and if there would be no prompts."""
        check_counts(self.num_train, self.num_dev, self.num_test, self.num_final or 0)
        for part in self.final_parts:
            if not is_count(part) or part >= NUM_PARTS or self.final_parts.count(part) > 1:
                raise UserError(
                    f"data.final_part={self.final_part} is no part of the final split; give a number from 0 to {NUM_PARTS - 1}, a list of "
                    "different ones, or null for none."
                )
        if self.num_test > NUM_READ:
            raise UserError(
                f"data.num_test={self.num_test} reaches into the final prompts, which begin after the first {NUM_READ} test prompts; set it to "
                f"at most {NUM_READ}, which is what has been read. For a figure that is published, name a part of the others: split={FINAL} "
                "data.final_part=0."
            )

    def check_final(self) -> None:
        """Raise UserError unless final prompts are asked for."""
        if not self.final_parts or self.num_final == 0:
            raise UserError(
                f"split={FINAL} needs final prompts, but data.final_part={self.final_part} and data.num_final={self.num_final} ask for none; "
                f"name a part that was never read, for example data.final_part=0, and leave data.num_final=null."
            )

    @property
    def final_parts(self) -> list[int]:
        """The parts of the final split that are asked for."""
        if self.final_part is None:
            return []
        is_list = isinstance(self.final_part, Sequence) and not isinstance(self.final_part, str)
        return list(self.final_part) if is_list else [self.final_part]

    def provenance(self) -> dict[str, str]:
        """Return what decides the prompts, other than the keys of data: the library is that of the Python at work."""
        return {"python": platform.python_version()}

    def load(self, chats: bool, responses: bool = False) -> Iterator[Prompt]:
        """Yield up to the wanted number of prompts per split, in an order that looks random but is fixed.

        They are code to go on with, for a pair that chats (`chats`) as for any other. With `responses` each has its function's body.
        """
        self.check()
        wanted = {"train": self.num_train, "dev": self.num_dev, "test": self.num_test}
        found: dict[str, dict[str, Prompt]] = {split: {} for split in SPLITS}
        for side in ("dev", "test"):
            for function in corpus.standard_library(side):
                split = "test" if side == "test" else "dev" if _share(function.source) < DEV_FILES else "train"
                body = function.body if responses else None
                prompt_id = text_id(function.prompt)
                # A prompt that several files share belongs to the first of them by name, in whatever order they are read.
                known = found[split].get(prompt_id)
                group = function.source if known is None else min(known.group, function.source)
                found[split][prompt_id] = Prompt(prompt_id, split, function.prompt, body, group)
        for split in SPLITS:
            yield from sorted(found[split].values(), key=lambda prompt: prompt.prompt_id)[: wanted[split]]
        if self.final_parts:
            yield from self._final(found)

    def _final(self, found: Mapping[str, Mapping[str, Prompt]]) -> list[Prompt]:
        """Return the final prompts that are asked for, of those of all splits by id."""
        unread = [found["test"][prompt_id] for prompt_id in sorted(found["test"])[NUM_READ:]]
        per_file: Counter[str] = Counter()
        kept = []
        for prompt in unread:
            if prompt.prompt_id in found["train"] or prompt.prompt_id in found["dev"]:
                continue  # a text that dev files hold too, on which heads are trained
            per_file[prompt.group] += 1
            if per_file[prompt.group] <= FINAL_PER_FILE and int(prompt.prompt_id, 16) % NUM_PARTS in self.final_parts:
                kept.append(replace(prompt, split=FINAL))
        return kept[: self.num_final]


@dataclass(frozen=True)
class DatasetSource:
    """`data=alpaca` and the like: rows of a hub data set, a local file or a folder, through a template.

    The first `num_train` prompts are the train prompts, the next the dev prompts, and the next the test prompts unless those
    have a split of their own; final prompts, if any, follow the test prompts. The fields are the keys of conf/data/*.yaml, which explain
    them.
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
    num_final: int = 0

    def check(self) -> None:
        """Raise UserError for what can be known to be wrong before data is read."""
        from specheads.prompts import data_set  # imports `datasets`: slow, and nano does without

        check_counts(self.num_train, self.num_dev, self.num_test, self.num_final)
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

    def check_final(self) -> None:
        """Raise UserError unless final prompts are asked for."""
        if not self.num_final:
            raise UserError(
                f"split={FINAL} needs final prompts, but data.num_final={self.num_final} asks for none; say how many, for example "
                "data.num_final=500."
            )

    def provenance(self) -> dict[str, str]:
        """Return what decides the prompts, other than the keys of data: nothing."""
        return {}

    def load(self, chats: bool, responses: bool = False) -> list[Prompt]:
        """Return the prompts; short data gives fewer of each split, in proportion.

        Args:
            chats: whether the pair that answers takes instructions; if not, `completion_template` is used where there is one.
            responses: whether to fill in the data set's own, by `response_template`, where a row has one.

        Raises:
            UserError: settings that are wrong, a data set that cannot be loaded, rows that the template does not fit.
        """
        from specheads.prompts import data_set

        self.check()
        tables = data_set.load_tables(self.path, self.name)
        splits = (*SPLITS, FINAL) if self.num_final else SPLITS
        takes = [("data.split", self.split, splits)]
        if self.test_split is not None and not isinstance(tables, Table):
            takes = [("data.split", self.split, splits[:2]), ("data.test_split", self.test_split, splits[2:])]
        prompts = []
        for key, taken, splits in takes:
            counts = {split: getattr(self, f"num_{split}") for split in splits}
            if any(counts.values()):
                rows = data_set.cut(tables, self.path, key, taken)
                answers = self._response_template() if responses else None
                texts = self._texts(rows, self._template(chats), answers, limit=sum(counts.values()))
                names = [split for split, count in self._available(counts, len(texts)).items() for _ in range(count)]
                prompts += [Prompt(text_id(text), split, text, own) for split, (text, own) in zip(names, texts, strict=True)]
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


def groups_of(prompts: Iterable[Prompt]) -> list[str]:
    """Return the group of each prompt; one without is its own."""
    return [prompt.group or prompt.prompt_id for prompt in prompts]


def check_counts(num_train: int, num_dev: int, num_test: int, num_final: int) -> None:
    """Raise UserError unless these are counts, and not all but the last of them 0."""
    counts = {"data.num_train": num_train, "data.num_dev": num_dev, "data.num_test": num_test}
    for key, count in (counts | {"data.num_final": num_final}).items():
        if not is_count(count):
            raise UserError(f"{key}={count} is no count; give a whole number, 0 or more.")
    if not any(counts.values()) and not num_final:
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


def text_id(text: str) -> str:
    """Return the id of a prompt with this text: 64 bits of its hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ids_hash(prompt_ids: Iterable[str]) -> str:
    """Return what identifies a set of prompts, in whatever order: 64 bits of the hash of their ids."""
    return hashlib.sha256(" ".join(sorted(prompt_ids)).encode()).hexdigest()[:16]


def _share(name: str) -> float:
    return int.from_bytes(hashlib.sha256(b"head " + name.encode()).digest()[:4], "big") / 2**32
