"""Templates: how a row of a data set becomes the text of a prompt."""

import logging
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from specheads.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Template:
    """Texts over a row's fields, such as "{instruction}", tried in order; `key` is the config key that messages name."""

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
                    f"{key}={text!r}: {problem}; write plain names of fields in braces, such as {{instruction}}, and double "
                    "a brace that is meant as one."
                )
        return cls(key, texts)

    @property
    def fields(self) -> list[str]:
        """All names in braces."""
        return list(dict.fromkeys(field for text in self.texts for field in _fields(text)))

    def restricted(self, known: Collection[str], path: str) -> "Template":
        """Return the template without texts that name a field which is not `known`; raises UserError if none is left."""
        lacking = {text: [field for field in _fields(text) if field not in known] for text in self.texts}
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
            if not any(_is_blank(row.get(field)) for field in _fields(text)):
                return text.format_map(row)
        return None


def _fields(text: str) -> list[str]:
    return [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]


def _problem(text: str) -> str | None:
    """Return the mistake in a template, or None. Formats, attributes and indices are mistakes, because rows hold plain values."""
    try:
        pieces = [piece for _, *piece in string.Formatter().parse(text) if piece[0] is not None]
    except ValueError as error:  # a brace without its partner
        return str(error)
    for field, format_spec, conversion in pieces:
        if not field or field.isdigit():
            return "a field has no name"
        if format_spec or conversion or "." in field or "[" in field:
            return f"the field {field.split('.')[0].split('[')[0]!r} has an attribute, an index or a format"
    return None if pieces else "it names no field, so all prompts would be the same"


def _is_blank(value: object) -> bool:
    return value is None or not str(value).strip()
