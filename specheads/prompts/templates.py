"""Rows with the places that they have in their source, so that a message can name one, and
templates that make texts of them.
"""

import json
import logging
import math
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specheads.errors import UserError

if TYPE_CHECKING:
    import datasets  # slow to import, so imported where it is used

logger = logging.getLogger(__name__)

_BROKEN = re.compile("[\0\ud800-\udfff]")
_MESSAGES_AS_TEXT = re.compile(
    r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:|\s*\[\s*\]\s*$"""
)
_FIELD = re.compile(r"[^.\[\]]+(\[[^\[\]]+\])*")  # "input", "translation[de]", "turns[0]"


@dataclass(frozen=True)
class SourceRows:
    """Rows in order.

    `row_name` is the name of a row in its source ("line"), `first` the number of the first row
    there.
    """

    rows: "list[dict] | datasets.Dataset"
    row_name: str = "row"
    first: int = 1

    @property
    def fields(self) -> list[str]:
        if isinstance(self.rows, list):
            fields = dict[str, None]()
            for row in self.rows:
                fields |= dict.fromkeys(row)
            return list(fields)
        return self.rows.column_names

    def part(self, start: int, stop: int) -> "SourceRows":
        """Return the rows from number `start` to before `stop`, counted from 0."""
        rows = (
            self.rows[start:stop]
            if isinstance(self.rows, list)
            else self.rows.select(range(start, stop))
        )
        return SourceRows(rows, self.row_name, self.first + start)

    def numbered(self, fields: Sequence[str]) -> Iterator[tuple[str, dict]]:
        """Yield ("line 3", row) and so on.

        Columns that `fields` do not name, such as images, are not decoded.
        """
        known = self.fields
        columns = dict.fromkeys(
            column for field in fields if (column := _column_of(field)) in known
        )
        rows = self.rows if isinstance(self.rows, list) else self.rows.select_columns(list(columns))
        for number, row in enumerate(rows, self.first):
            yield f"{self.row_name} {number}", row


@dataclass(frozen=True)
class Template:
    """Texts over a row's fields, such as "{instruction}", tried in order.

    `key` is the config key that messages name.

    A field may be a part of a column that holds several values: "{translation[de]}", "{turns[0]}".
    """

    key: str
    texts: tuple[str, ...]

    @classmethod
    def parse(cls, key: str, value: str | Sequence[str]) -> "Template":
        """Return the template of a text or a list of texts.

        Raises UserError for anything else and for malformed texts.
        """
        texts = (
            (value,)
            if isinstance(value, str)
            else tuple(value)
            if isinstance(value, Sequence)
            else ()
        )
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"{key}={value!r} must be text or a list of texts, for example"
                f" '{key}=\"{{instruction}}\"'."
            )
        for text in texts:
            if problem := _problem(text):
                raise UserError(
                    f"{key}={text!r}: {problem}; write plain names of fields in braces, such as"
                    " {instruction}, {translation[de]} and {turns[0]}, and double other braces."
                )
        return cls(key, texts)

    @property
    def fields(self) -> list[str]:
        """All that stands in braces: names of columns, and of parts of columns."""
        fields = dict[str, None]()
        for text in self.texts:
            fields |= dict.fromkeys(_fields(text))
        return list(fields)

    def restricted(self, known: Collection[str], path: str) -> "Template":
        """Return the template without texts that name a column which is not `known`.

        Raises UserError if none is left.
        """
        lacking = dict[str, list[str]]()
        for text in self.texts:
            columns = map(_column_of, _fields(text))
            lacking[text] = [column for column in columns if column not in known]
        texts = tuple(text for text in self.texts if not lacking[text])
        if not texts:
            text = self.texts[0]
            raise UserError(
                f"{self.key}={text!r} names the field {lacking[text][0]!r}, but {path} has"
                f" {', '.join(known) or 'none'}; give a {self.key} with fields that it has."
            )
        for text in set(self.texts) - set(texts):
            logger.warning(
                "data: %s has no field %r, so %s=%r is not used",
                path,
                lacking[text][0],
                self.key,
                text,
            )
        return replace(self, texts=texts)

    def chat(self, row: Mapping) -> tuple[str, list | str] | None:
        """Return the field and the value of a text that is a single field with messages,
        "{messages}"; None if there is none.
        """
        for text in self.texts:
            field = text[1:-1]
            if _fields(text) != [field]:
                continue
            value = value_at(row, field)
            if isinstance(value, str) and _MESSAGES_AS_TEXT.match(value):
                return field, value
            if isinstance(value, list) and any(
                isinstance(each, Mapping) and {"role", "from"} & each.keys() for each in value
            ):
                return field, value
        return None

    def fill(self, row: Mapping) -> str | None:
        """Return the first text whose fields are all in `row` and not blank, filled in.

        None if there is no such text.
        """
        for text in self.texts:
            values = {field: value_at(row, field) for field in _fields(text)}
            if all(value is not None and str(value).strip() for value in values.values()):
                filled = ""
                for plain, field, _, _ in string.Formatter().parse(text):
                    filled += plain if field is None else f"{plain}{values[field]}"
                return filled
        return None


def _fields(text: str) -> list[str]:
    return [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]


def _problem(text: str) -> str | None:
    """Return the mistake in a template, or None.

    Formats and attributes are mistakes, because rows hold plain values.
    """
    try:
        pieces = [piece for _, *piece in string.Formatter().parse(text) if piece[0] is not None]
    except ValueError as error:  # a brace without its partner
        return str(error)
    for field, format_spec, conversion in pieces:
        if not field or field.isdigit():
            return "a field has no name"
        if format_spec or conversion or not _FIELD.fullmatch(field):
            return (
                f"the field {field.split('.')[0].split('[')[0]!r} has an attribute, a wrong index"
                " or a format"
            )
    return None if pieces else "it names no field, so all prompts would be the same"


def _column_of(field: str) -> str:
    return field.partition("[")[0]


def value_at(row: Mapping, field: str) -> object:
    """Return the value of a field of a row, of "turns[0]" the first of a list.

    None where it is absent, empty or NaN.
    """
    value, *parts = row.get(_column_of(field)), *re.findall(r"\[([^\[\]]+)\]", field)
    for part in parts:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif (
            isinstance(value, list)
            and re.fullmatch(r"-?\d+", part)
            and -len(value) <= int(part) < len(value)
        ):
            value = value[int(part)]
        else:
            return None  # a text has no parts
    return None if value == [] or (isinstance(value, float) and math.isnan(value)) else value


def check_values(row: Mapping, fields: Sequence[str]) -> None:
    """Raise ValueError unless the fields of a row are texts or numbers."""
    for field in fields:
        if (value := value_at(row, field)) is None:
            continue
        kind = kind_of(value)
        if kind not in ("a text", "a number"):
            remedy = "convert it"
            if isinstance(value, Mapping) and value:
                remedy = (
                    f"convert it, or name a part of it, such as {{{field}[{next(iter(value))}]}}"
                )
            elif isinstance(value, list):
                remedy = f"join it into one text, or take one entry alone, such as {{{field}[0]}}"
            raise ValueError(
                f"the field {field!r} is {kind}; prompts are made of texts and numbers: {remedy}"
            )
        if isinstance(value, str) and (broken := _BROKEN.search(value)):
            name = "a NUL character" if broken[0] == "\0" else "half a character (a surrogate)"
            raise ValueError(f"the field {field!r} holds {name}; the file may be damaged")


# What data sets call roles, in lower case, and what chat templates call them; ShareGPT's first.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("model", "bot", "ai", "assistant"), "assistant"),
    **dict.fromkeys(("observation", "function", "ipython", "tool"), "tool"),
    "system": "system",
    "developer": "developer",
}
# What templates read.
_KEPT = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "thinking",
)
NO_QUESTION = ("assistant", "system", "developer")  # roles that a response does not follow


def messages_of(field: str, messages: Sequence | str) -> list[dict]:
    """Return the messages in the `field` of a row as chat templates take them, {"role": ...,
    "content": ...}.

    Those of ShareGPT have "from" and "value", those of CSV files are JSON. Raises ValueError for
    what is no message of texts.
    """
    found = []
    if isinstance(messages, str):
        messages = from_json(messages, field)
    row = {field: messages}
    for number, message in enumerate(messages):
        at = f"{field}[{number}]"
        source = "role" if isinstance(message, Mapping) and "role" in message else "from"
        named = message.get(source) if isinstance(message, Mapping) else None
        role = _ROLES.get(named.strip().lower()) if isinstance(named, str) else None
        if role is None:
            known = f"{source}={named!r}" if named is not None else kind_of(message)
            raise ValueError(
                f"the field {at!r} is {known}, no message; expected role and content, or from and"
                f" value, with a role of {', '.join(_ROLES)}"
            )
        key = "content" if source == "role" else "value"
        parts = message.get(key)
        if isinstance(parts, list) and all(
            isinstance(part, Mapping) and part.get("type") == "text" for part in parts
        ):
            fields = [f"{at}[{key}][{each}][text]" for each in range(len(parts))]
            contents = [part.get("text") for part in parts]
        else:
            fields = [f"{at}[{key}]"]
            contents = [value_at(message, key)]
        check_values(row, fields)
        text = "".join("" if content is None else str(content) for content in contents)
        kept = {}
        if key == "content":
            kept = {name: message[name] for name in _KEPT if message.get(name) is not None}
        found.append(kept | {"role": role, "content": text})
    return found


def from_json(text: str, field: str) -> Any:
    """Return what a text in a row's field is JSON of. Raises ValueError if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the field {field!r} is a text that is no JSON ({error}); write it as JSON"
        ) from None


def as_json(value: object) -> str:
    """Return messages as JSON without nulls, which Parquet files have for absent keys.

    Raises ValueError for what JSON has not.
    """
    try:
        whole = json.dumps(value, allow_nan=False)
        plain = json.loads(whole, object_hook=_without_nulls)
        text = json.dumps(plain, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the messages cannot be written as JSON ({error})") from None
    return text


def _without_nulls(keys: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in keys.items() if value is not None}


_KINDS = {
    type(None): "null",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    bytes: "bytes",
}


def kind_of(value: object) -> str:
    """Return the type of a value in words."""
    if isinstance(value, float) and math.isinf(value):
        return "an infinite number"
    return _KINDS.get(type(value), f"a {type(value).__name__}")
