"""Templates: how a row of a data set becomes the text of a prompt."""

import logging
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from specheads.errors import UserError
from specheads.prompts.table import FIELD, column_of, value_at

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
