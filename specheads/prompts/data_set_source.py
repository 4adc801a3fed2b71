"""Prompts from any data set that `datasets` loads, through a template: how a row becomes the text
of a prompt.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Literal

from specheads.errors import UserError
from specheads.prompts.data_set_files import check_path, check_split
from specheads.prompts.prompt import FINAL, SPLITS, Prompt, check_some, scaled_down, text_id
from specheads.prompts.templates import (
    NO_QUESTION,
    SourceRows,
    Template,
    as_json,
    check_values,
    from_json,
    messages_of,
    value_at,
)
from specheads.settings import Count, Flag, Text, argument, check_arguments, shown

logger = logging.getLogger(__name__)

_REFERENCE = (  # stands in SPEED-Bench on the hub for texts of others
    "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
)


@dataclass(frozen=True)
class DatasetSource:
    """`data=alpaca` and the like: rows of a hub data set, a file or a folder, through a template.

    Raises UserError for mistakes.

    The first `num_train` prompts are the train prompts, the next the dev prompts, and the next the
    test prompts unless `test_split` names another split; final prompts, if any, follow the test
    prompts.
    """

    path: Text = argument(
        ...,
        "a hub data set, a folder of save_to_disk, or a JSON, JSONL, CSV, Parquet or text file,"
        " here or at an https address",
    )
    name: Text | None = argument(..., "the configuration of a hub data set; null: its default")
    split: Text = argument(
        ..., "the split that the prompts come from; slices work, of local files too: train[:500]"
    )
    test_split: Text | None = argument(
        ..., "the split of the test prompts; null: they follow the dev prompts, as in local files"
    )
    template: str | Sequence[str] = argument(
        ...,
        "text over the data set's fields, such as {question}, {translation[de]} or {messages}, or a"
        " list of texts: the first whose fields are not blank is used",
        object,
    )
    completion_template: str | Sequence[str] | None = argument(
        ...,
        "the template for a pair that continues a text and takes no instructions; null: template",
        object,
    )
    num_train: Count = argument(
        ...,
        "the number of train prompts; with fewer rows than asked for, splits shrink in proportion",
    )
    num_dev: Count = argument(..., "the number of dev prompts, which follow the train prompts")
    num_test: Count = argument(
        ...,
        "the number of test prompts, which follow the dev prompts or are the first of test_split",
    )
    response_template: str | Sequence[str] | None = argument(
        None,
        "the template of the data set's own responses, for specheads distill samples=text",
        object,
    )
    num_final: Count = argument(
        0,
        "the number of final prompts, which follow the test prompts, for split=final",
    )
    revision: Text | None = argument(
        None, "a commit, tag or branch of a hub data set; null: the newest"
    )
    shuffled: Flag = argument(
        False,
        "whether rows are taken in a fixed order that looks random, which reads all",
    )
    turns: Literal["last", "all"] = argument(
        "last",
        "which responses of a conversation are generated: last, or all, each with the data set's"
        " own history before it",
    )
    where: Mapping[str, object] | None = argument(
        None,
        "which rows are taken, by values of columns: {category: coding}, {category: [coding,"
        " math]}; null: all",
    )

    def __post_init__(self) -> None:
        check_arguments(self, "data")
        check_some(self.num_train, self.num_dev, self.num_test, self.num_final)
        for name in ("template", "completion_template", "response_template"):
            if name == "template" or getattr(self, name) is not None:
                self._parsed(name)
        for name in ("split", "test_split"):
            if (split := getattr(self, name)) is not None:
                check_split(f"data.{name}", split)
        check_path(self.path)

    def check_final(self) -> None:
        if not self.num_final:
            raise UserError(f"split={FINAL} needs final prompts; ask for some: data.num_final=500.")

    def provenance(self) -> dict[str, str]:
        return {}  # the keys of data alone decide the prompts

    def load(self, chats: bool, responses: bool = False) -> list[Prompt]:
        """Return the prompts, for a pair that takes instructions (`chats`) or not.

        A short data set gives fewer in proportion.

        With `responses` they have the data set's own. Raises UserError where it cannot be loaded,
        or the template does not fit.
        """
        from specheads.prompts import data_set  # imports `datasets`: slow, and nano does without

        template = self._parsed(
            "template" if chats or self.completion_template is None else "completion_template"
        )
        answers = (
            self._parsed("response_template")
            if responses and self.response_template is not None
            else None
        )
        tables = data_set.load_tables(self.path, self.name, self.revision)
        splits: tuple[str, ...] = (*SPLITS, FINAL) if self.num_final else SPLITS
        takes = {"split": splits}
        if self.test_split is not None and not isinstance(tables, SourceRows):
            takes = {"split": splits[:2], "test_split": splits[2:]}
        prompts = list[Prompt]()
        for key, taken in takes.items():
            counts = {split: getattr(self, f"num_{split}") for split in taken}
            if any(counts.values()):
                rows = data_set.cut(tables, self.path, f"data.{key}", getattr(self, key))
                earlier = {prompt.prompt_id for prompt in prompts}
                found = self._found(rows, template, answers, earlier, limit=sum(counts.values()))
                names = list[str]()
                for split, count in self._available(counts, len(found)).items():
                    names += [split] * count
                placed = list[Prompt]()
                for split, prompt in zip(names, found, strict=True):
                    placed.append(replace(prompt, split=split))
                prompts += _kept_together(placed)
        if not responses:
            return [replace(prompt, response=None) for prompt in prompts]
        if self.response_template is None and not any(prompt.response for prompt in prompts):
            raise UserError(
                "data.response_template=null, but the data set's own responses are asked for; say"
                " where they are, for example 'data.response_template=\"{output}\"'."
            )
        return prompts

    def _available(self, counts: dict[str, int], num_texts: int) -> dict[str, int]:
        """Return how many of `num_texts` prompts each split gets: as many as asked for, or in that
        proportion.
        """
        asked = sum(counts.values())
        if num_texts == asked:
            return counts
        scaled = dict(zip(counts, scaled_down(list(counts.values()), num_texts), strict=True))
        shares = ", ".join(f"{count} {split}" for split, count in scaled.items())
        logger.info(
            "data: %s has %d prompts, not the %d asked for; in proportion: %s",
            self.path,
            num_texts,
            asked,
            shares,
        )
        return scaled

    def _parsed(self, name: str) -> Template:
        return Template.parse(f"data.{name}", getattr(self, name))

    def _found(
        self,
        tables: Sequence[SourceRows],
        template: Template,
        answers: Template | None,
        earlier: set[str],
        limit: int,
    ) -> list[Prompt]:
        """Return up to `limit` different prompts of rows that fit the template, none of an
        `earlier` id.
        """
        columns = dict[str, None]()
        for table in tables:
            columns |= dict.fromkeys(table.fields)
        known = list(columns)
        template = template.restricted(known, self.path)
        answers = answers and answers.restricted(known, self.path)
        fields = list(dict.fromkeys([*template.fields, *(answers.fields if answers else [])]))
        prompts: list[Prompt] = []
        num_rows = num_unfit = num_repeated = 0
        where = dict[str, list[str]]()
        for column, given in (self.where or {}).items():
            where[column] = list(map(str, given if isinstance(given, list) else [given]))
        place = "its rows"
        try:
            numbered = [table.numbered([*fields, "system", "tools", *where]) for table in tables]
            for place, row in chain.from_iterable(numbered):
                if len(prompts) >= limit and not self.shuffled:
                    break
                if any(str(row.get(column)) not in values for column, values in where.items()):
                    continue
                of_row = self._prompts_of(row, template, answers, fields, place)
                num_rows += 1
                num_unfit += not of_row
                new = [prompt for prompt in of_row if prompt.prompt_id not in earlier]
                num_repeated += len(of_row) - len(new)
                earlier.update(prompt.prompt_id for prompt in new)
                prompts += new
        except (ValueError, OSError) as error:  # of a row, or of a damaged column
            raise UserError(f"data.path={self.path!r}, {place}: {error}.") from error
        if not num_rows:
            raise UserError(
                f"data.where={shown(self.where)} fits no row of {self.path}, whose columns are"
                f" {', '.join(known)}."
            )
        if num_unfit:
            message = "data: %d of %d rows of %s left out: no text in fields of %s"
            logger.info(message, num_unfit, num_rows, self.path, template.key)
        if num_repeated:
            message = "data: %d prompts of %s left out: earlier ones are the same"
            logger.info(message, num_repeated, self.path)
        if not prompts:
            raise UserError(
                f"data.path={self.path!r} gives no prompt: {num_repeated} are prompts of an earlier"
                f" split, and {num_unfit} of {num_rows} rows have no text in"
                f" {', '.join(template.fields)}, the fields of {template.key}."
            )
        if self.shuffled:
            prompts.sort(key=lambda prompt: prompt.group or prompt.prompt_id)
        return prompts[:limit]

    def _prompts_of(
        self,
        row: Mapping,
        template: Template,
        answers: Template | None,
        fields: Sequence[str],
        place: str,
    ) -> list[Prompt]:
        """Return the prompts of a row. Raises ValueError for what is no text."""
        if found := template.chat(row):
            return self._turns(row, *found, place)
        check_values(row, fields)
        text = template.fill(row)
        if text is None:
            return []
        if text.startswith(_REFERENCE):
            raise ValueError(
                "it refers to a different data set in place of its text; give the file that the"
                " prepare.py of SPEED-Bench's card writes: data.path=<file>"
            )
        response = answers.fill(row) if answers else None
        return [Prompt(text_id(text), "", text, response, place=place)]

    def _turns(self, row: Mapping, field: str, value: Sequence, place: str) -> list[Prompt]:
        """Return the prompts of a conversation, without those that end in an empty message: what
        precedes each response.
        """
        messages = messages_of(field, value)
        check_values(row, ["system"])
        system = value_at(row, "system")
        tools = value_at(row, "tools")
        if (
            messages
            and str(system or "").strip()
            and messages[0]["role"] not in ("system", "developer")
        ):
            messages.insert(0, {"role": "system", "content": str(system)})
        if isinstance(tools, str):
            tools = from_json(tools, "tools") if tools.strip() else None
        group = text_id(as_json(messages))
        found = []
        for end, (message, after) in enumerate(zip_longest(messages, messages[1:]), 1):
            if (
                message["role"] in NO_QUESTION
                or (after and after["role"] != "assistant")
                or not message["content"].strip()
            ):
                continue
            is_chat = (
                end > 1 or bool(tools) or message != {"role": "user", "content": message["content"]}
            )
            given = {"messages": messages[:end]} | ({"tools": tools} if tools else {})
            text = as_json(given) if is_chat else message["content"]
            response = after["content"] if after else None
            found.append(Prompt(text_id(text), "", text, response, group, is_chat, place))
        return found if self.turns == "all" else found[-1:]


def _kept_together(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts without those whose conversation began in an earlier split."""
    kept = []
    first = dict[str | None, str]()
    for prompt in prompts:
        if prompt.group is None or first.setdefault(prompt.group, prompt.split) == prompt.split:
            kept.append(prompt)
    if len(kept) < len(prompts):
        logger.info(
            "data: %d prompts left out, whose conversations began in an earlier split",
            len(prompts) - len(kept),
        )
    return kept
