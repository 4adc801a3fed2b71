"""Prompts from any data set that `datasets` loads, through a template: how a row becomes the text of a prompt."""

import logging
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from specheads.errors import UserError
from specheads.prompts.prompt import FINAL, SCORES, SPLITS, Prompt, check_counts, scaled_down, text_id
from specheads.prompts.rows import FIELD, Table, check_values, column_of, value_at

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Template:
    """Texts over a row's fields, such as "{instruction}", tried in order; `key` is the config key that messages name.

    A field may be a part of a column that holds several values: "{translation[de]}", "{turns[0]}".
    """

    key: str
    texts: tuple[str, ...]

    @classmethod
    def parse(cls, key: str, value: str | Sequence[str]) -> "Template":
        """Return the template of a text or a list of texts; raises UserError for anything else and for malformed texts."""
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UserError(f"{key}={value!r} must be text or a list of texts, for example '{key}=\"{{instruction}}\"'.")
        for text in texts:
            if problem := _problem(text):
                raise UserError(
                    f"{key}={text!r}: {problem}; write plain names of fields in braces, such as {{instruction}}, or parts of "
                    "them, such as {translation[de]} and {turns[0]}, and double a brace that is meant as one."
                )
        return cls(key, texts)

    @property
    def fields(self) -> list[str]:
        """All that stands in braces: names of columns, and of parts of columns."""
        return list(dict.fromkeys(field for text in self.texts for field in _fields(text)))

    def restricted(self, known: Collection[str], path: str) -> "Template":
        """Return the template without texts that name a column which is not `known`; raises UserError if none is left."""
        lacking = {text: [column for field in _fields(text) if (column := column_of(field)) not in known] for text in self.texts}
        texts = tuple(text for text in self.texts if not lacking[text])
        if not texts:
            text = self.texts[0]
            raise UserError(
                f"{self.key}={text!r} names the field {lacking[text][0]!r}, but {path} has {', '.join(known) or 'none'}; "
                f"give a {self.key} with fields that it has."
            )
        for text in set(self.texts) - set(texts):
            logger.warning("data: %s has no field %r, so %s=%r is not used", path, lacking[text][0], self.key, text)
        return replace(self, texts=texts)

    def fill(self, row: Mapping) -> str | None:
        """Return the first text whose fields are all in `row` and not blank, filled in; None if there is no such text."""
        for text in self.texts:
            values = {field: value_at(row, field) for field in _fields(text)}
            if not any(_is_blank(value) for value in values.values()):
                return "".join(plain if field is None else f"{plain}{values[field]}" for plain, field in _pieces(text))
        return None


def _pieces(text: str) -> list[tuple[str, str | None]]:
    """Return (plain text, the field after it or None) for all of a template."""
    return [(plain, field) for plain, field, _, _ in string.Formatter().parse(text)]


def _fields(text: str) -> list[str]:
    return [field for _, field in _pieces(text) if field is not None]


def _problem(text: str) -> str | None:
    """Return the mistake in a template, or None. Formats and attributes are mistakes, because rows hold plain values."""
    try:
        pieces = [piece for _, *piece in string.Formatter().parse(text) if piece[0] is not None]
    except ValueError as error:  # a brace without its partner
        return str(error)
    for field, format_spec, conversion in pieces:
        if not field or field.isdigit():
            return "a field has no name"
        if format_spec or conversion or not FIELD.fullmatch(field):
            return f"the field {field.split('.')[0].split('[')[0]!r} has an attribute, a wrong index or a format"
    return None if pieces else "it names no field, so all prompts would be the same"


def _is_blank(value: object) -> bool:
    return value is None or not str(value).strip()


@dataclass(frozen=True)
class DatasetSource:
    """`data=alpaca` and the like: rows of a hub data set, a file or a folder, through a template.

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
        score: how well evaluations that measure quality score decoded responses, by response_template: exact_number (whether the
            last number is the reference's), rouge_l, or null for no score.
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
    score: str | None = None

    def check(self) -> None:
        """Raise UserError for mistakes that show before data is read."""
        from specheads.prompts import data_set  # imports `datasets`: slow, and nano does without

        check_counts(self.num_train, self.num_dev, self.num_test, self.num_final)
        for chats in (True, False):
            self._template(chats)
        if self.response_template is not None:
            self._response_template()
        if self.score is not None:
            self._check_score()
        data_set.check_path(self.path)
        if not isinstance(self.name, str | None):
            raise UserError(f"data.name={self.name!r} must be text, the name of a configuration, or null.")
        if not isinstance(self.revision, str | None):
            raise UserError(f"data.revision={self.revision!r} must be text, a commit, tag or branch of the data set, or null.")
        if not isinstance(self.shuffled, bool):
            raise UserError(f"data.shuffled={self.shuffled!r} must be true or false.")
        data_set.check_split("data.split", self.split)
        if self.test_split is not None:
            data_set.check_split("data.test_split", self.test_split)

    def _check_score(self) -> None:
        """Raise UserError for a score that is not known, or that has nothing to compare responses with."""
        if self.score not in SCORES:
            raise UserError(f"data.score={self.score!r} must be {', '.join(SCORES)}, or null for no score.")
        if self.response_template is None:
            raise UserError(
                f"data.score={self.score} compares responses with those of the data set, but data.response_template=null; say "
                "where they are, for example 'data.response_template=\"{answer}\"', or use data.score=null."
            )

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
            UserError: settings that are wrong, a data set that cannot be loaded, rows that the template does not fit.
        """
        from specheads.prompts import data_set

        self.check()
        tables = data_set.load_tables(self.path, self.name, self.revision)
        splits: tuple[str, ...] = (*SPLITS, FINAL) if self.num_final else SPLITS
        takes: list[tuple[str, str, tuple[str, ...]]] = [("data.split", self.split, splits)]
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
                prompts += [
                    Prompt(text_id(text), split, text, response) for split, (text, response) in zip(names, texts, strict=True)
                ]
        return prompts

    def _rows(self, tables: Sequence[Table], fields: Sequence[str]) -> Iterator[tuple[str, dict]]:
        """Yield the rows with their places. Raises UserError for a column that is damaged, which shows only now."""
        try:
            for table in tables:
                yield from table.numbered(fields)
        except (ValueError, OSError) as error:
            raise UserError(f"data.path={self.path!r} cannot be read ({error}); write it again.") from error

    def _available(self, counts: dict[str, int], num_texts: int) -> dict[str, int]:
        """Return how many of `num_texts` prompts each split gets: as many as asked for, or in that proportion."""
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
        """Return (text, response) of `limit` rows that fit the template, the first unless shuffled, or of all that there are."""
        known = list(dict.fromkeys(field for table in tables for field in table.fields))
        template = template.restricted(known, self.path)
        answers = answers and answers.restricted(known, self.path)
        fields = list(dict.fromkeys([*template.fields, *(answers.fields if answers else [])]))
        texts: list[tuple[str, str | None]] = []
        seen: dict[str, tuple[str, str]] = {}
        num_unfit = 0
        for place, row in self._rows(tables, fields):
            if len(texts) == limit and not self.shuffled:
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
        return sorted(texts, key=lambda each: text_id(each[0]))[:limit] if self.shuffled else texts
