"""Prompts from any data set that `datasets` loads, through a template: how a row becomes the text of a prompt."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from specheads.errors import UserError
from specheads.prompts.prompt import FINAL, SPLITS, Prompt, check_counts, scaled_down, text_id
from specheads.prompts.rows import SourceRows, Template, check_values

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetSource:
    """`data=alpaca` and the like: rows of a hub data set, a file or a folder, through a template. Raises UserError for mistakes.

    The first `num_train` prompts are the train prompts, the next the dev prompts, and the next the test prompts unless those
    have a split of their own; final prompts, if any, follow the test prompts.

    Args:
        path: a hub data set, a folder of save_to_disk, or a JSON, JSONL, CSV, Parquet or text file, here or at an https address.
        name: configuration of a hub data set; null: its default.
        split: split that the prompts come from; slices work, of local files too: train[:500].
        test_split: split that the test prompts come from; null: they follow the dev prompts, as in a local file.
        template: text over the data set's fields, such as {question}, {translation[de]} or {turns[0]}, or a list of texts: the
            first whose fields are not blank is used.
        completion_template: template for a pair that continues a text and takes no instructions; null: template.
        num_train: train prompts; with fewer rows than asked for, splits shrink in proportion.
        num_dev: dev prompts: those after the train prompts.
        num_test: test prompts: those after the dev prompts, or the first of test_split.
        response_template: template of the data set's own responses, for specheads distill samples=text; null: it has none.
        num_final: final prompts: those after the test prompts, for evaluations with split=final; read once, to publish a figure.
        revision: commit, tag or branch of a hub data set; null: the newest.
        shuffled: take the rows of a split in an order that looks random but is fixed, where they are sorted by task; reads all.
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
    revision: str | None = None
    shuffled: bool = False

    def __post_init__(self) -> None:
        from specheads.prompts import data_set  # imports `datasets`: slow, and nano does without

        check_counts(self.num_train, self.num_dev, self.num_test, self.num_final)
        for name in ("template", "completion_template", "response_template"):
            if name == "template" or getattr(self, name) is not None:
                self._parsed(name)
        splits = {"data.split": self.split} | ({} if self.test_split is None else {"data.test_split": self.test_split})
        data_set.check(self.path, splits)
        for name in ("name", "revision"):
            if not isinstance(value := getattr(self, name), str | None):
                raise UserError(f"data.{name}={value!r} must be text, or null for the data set's usual one.")
        if not isinstance(self.shuffled, bool):
            raise UserError(f"data.shuffled={self.shuffled!r} must be true or false.")

    def check_final(self) -> None:
        """Raise UserError unless final prompts are asked for."""
        if not self.num_final:
            raise UserError(
                f"split={FINAL} needs final prompts, but data.num_final={self.num_final} asks for none; give a number, for "
                "example data.num_final=500."
            )

    def provenance(self) -> dict[str, str]:
        """Return nothing: the keys of data alone decide the prompts."""
        return {}

    def load(self, chats: bool, responses: bool = False) -> list[Prompt]:
        """Return the prompts; a short data set gives fewer of each split, in proportion.

        Args:
            chats: whether the pair that answers takes instructions; if not, `completion_template` is used where there is one.
            responses: whether to fill in the data set's own, by `response_template`, where a row has one.

        Raises:
            UserError: a data set that cannot be loaded, rows that the template does not fit.
        """
        from specheads.prompts import data_set

        if responses and self.response_template is None:
            raise UserError(
                "data.response_template=null, but the data set's own responses are asked for; say where they are, for example "
                "'data.response_template=\"{output}\"', or take other samples."
            )
        template = self._parsed("template" if chats or self.completion_template is None else "completion_template")
        answers = self._parsed("response_template") if responses else None
        tables = data_set.load_tables(self.path, self.name, self.revision)
        splits: tuple[str, ...] = (*SPLITS, FINAL) if self.num_final else SPLITS
        takes = {"split": splits}
        if self.test_split is not None and not isinstance(tables, SourceRows):
            takes = {"split": splits[:2], "test_split": splits[2:]}
        prompts = []
        for key, taken in takes.items():
            counts = {split: getattr(self, f"num_{split}") for split in taken}
            if any(counts.values()):
                rows = data_set.cut(tables, self.path, f"data.{key}", getattr(self, key))
                texts = self._texts(rows, template, answers, limit=sum(counts.values()))
                names = [split for split, count in self._available(counts, len(texts)).items() for _ in range(count)]
                prompts += [
                    Prompt(text_id(text), split, text, response) for split, (text, response) in zip(names, texts, strict=True)
                ]
        return prompts

    def _available(self, counts: dict[str, int], num_texts: int) -> dict[str, int]:
        """Return how many of `num_texts` prompts each split gets: as many as asked for, or in that proportion."""
        asked = sum(counts.values())
        if num_texts == asked:
            return counts
        scaled = dict(zip(counts, scaled_down(list(counts.values()), num_texts), strict=True))
        shares = ", ".join(f"{count} {split}" for split, count in scaled.items())
        logger.info("data: %s has %d prompts, not the %d asked for; in proportion: %s", self.path, num_texts, asked, shares)
        return scaled

    def _parsed(self, name: str) -> Template:
        return Template.parse(f"data.{name}", getattr(self, name))

    def _texts(
        self, tables: Sequence[SourceRows], template: Template, answers: Template | None, limit: int
    ) -> list[tuple[str, str | None]]:
        """Return (text, response) of `limit` rows that fit the template, the first unless shuffled, or of all that there are."""
        known = list(dict.fromkeys(field for table in tables for field in table.fields))
        template = template.restricted(known, self.path)
        answers = answers and answers.restricted(known, self.path)
        fields = list(dict.fromkeys([*template.fields, *(answers.fields if answers else [])]))
        texts: list[tuple[str, str | None]] = []
        num_unfit = 0
        try:
            for place, row in (each for table in tables for each in table.numbered(fields)):
                if len(texts) == limit and not self.shuffled:
                    break
                check_values(row, fields, self.path, place)
                text = template.fill(row)
                if text is None:
                    num_unfit += 1
                else:
                    texts.append((text, answers.fill(row) if answers else None))
        except UserError:
            raise
        except (ValueError, OSError) as error:  # a damaged column, which shows only now
            raise UserError(f"data.path={self.path!r} cannot be read ({error}); write it again.") from error
        if num_unfit:
            message = "data: %d of %d rows of %s left out: no text in fields of %s"
            logger.info(message, num_unfit, num_unfit + len(texts), self.path, template.key)
        if not texts:
            raise UserError(
                f"data.path={self.path!r} gives no prompt: none of {num_unfit} rows has text in {', '.join(template.fields)}, "
                f"the fields of {template.key}; check it and the split."
            )
        return sorted(texts, key=lambda each: text_id(each[0]))[:limit] if self.shuffled else texts
