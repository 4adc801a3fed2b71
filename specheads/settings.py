"""What settings of commands are: frozen, checked where they are made, each field with its constraint and its sentence of help.

A mistake raises one UserError that names the key as the command line has it, its value, what was expected and what the field is for.
`fields_of` walks a class, for help texts and reference pages.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from specheads.errors import UserError

LARGEST_COUNT = 2**31 - 1  # of anything that is held in memory at once or numbered on disk


def _whole(value: Any) -> Any:
    """Return `value`; refuse what Python takes for a number and a user does not."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")  # noqa: TRY004 pydantic wants a ValueError
    return value


Number = Annotated[float, BeforeValidator(_whole), Field(allow_inf_nan=False)]
PositiveNumber = Annotated[Number, Gt(0)]
NonNegativeNumber = Annotated[Number, Ge(0)]
Probability = Annotated[Number, Ge(0), Le(1)]
Share = Annotated[Number, Gt(0), Le(1)]
Count = Annotated[int, BeforeValidator(_whole), Strict(), Ge(0), Le(LARGEST_COUNT)]
PositiveCount = Annotated[int, BeforeValidator(_whole), Strict(), Ge(1), Le(LARGEST_COUNT)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]


def setting(default: Any = ..., help: str = "", **constraints: Any) -> Any:
    """Return a field with its default (none: it must be given) and its sentence of help."""
    return Field(default, description=help, **constraints)


class _Checked(type(BaseModel)):
    """Makes a mistake in the arguments of a class of settings a UserError; settings within others are checked with them."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise UserError(message_of(error, cls)) from None


class Settings(BaseModel, metaclass=_Checked):
    """Base of all settings. Raises UserError for the first mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True)

    @classmethod
    def at(cls, prefix: str, values: Mapping[str, Any]) -> Self:
        """Return the settings of `values`, whose keys a command line has under `prefix` ("optimizer")."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise UserError(message_of(error, cls, prefix)) from None

    def but(self, **changes: Any) -> Self:
        """Return a copy with other values, which are checked like the first ones."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)


@dataclass(frozen=True)
class SettingField:
    """One key of a command: where it stands, its default and its sentence of help."""

    key: str
    default: Any
    help: str


def fields_of(cls: type[Settings], prefix: str = "") -> Iterator[SettingField]:
    """Yield every field of a class of settings, those of nested settings after the field that holds them."""
    for name, field in cls.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        yield SettingField(
            key, None if field.is_required() else field.get_default(call_default_factory=True), field.description or ""
        )
        for nested in _settings_in(field.annotation):
            yield from fields_of(nested, key)


def message_of(error: ValidationError, cls: type[Settings], prefix: str = "") -> str:
    """Return the first mistake as one message: the key, its value, what was expected, what the field is for."""
    errors = error.errors(include_url=False)
    same_key = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    first = max(same_key, key=lambda one: len(one["loc"]))  # of the kinds of a union, the one that the value comes closest to
    path = [part for part in first["loc"] if isinstance(part, str)]
    field = _field_at(cls, path)
    known = [name for name in path if _is_key(cls, path, name)]
    key = ".".join([*([prefix] if prefix else []), *known])
    value, expected = _shown(first["input"]), _expected(first)
    if first["type"] == "extra_forbidden":
        key = ".".join([*([prefix] if prefix else []), *path])
        siblings = _siblings(cls, path)
        return f"{key}={value} is not known; expected one of {', '.join(siblings)}."
    if first["type"] == "missing":
        return f"{key} is missing; {_described(field)}."
    if first["type"] == "value_error" and isinstance(first.get("ctx", {}).get("error"), UserError):
        return str(first["ctx"]["error"])
    reason = f"{key}={value} {expected}" if key else expected
    about = _described(field)
    return f"{reason}; it is {about}." if about else f"{reason}."


def _expected(first: Mapping[str, Any]) -> str:
    """Return what was expected, after "key=value"."""
    kind, context = first["type"], first.get("ctx", {})
    texts = {
        "greater_than": "must be above {gt}",
        "greater_than_equal": "must be at least {ge}",
        "less_than": "must be below {lt}",
        "less_than_equal": "must be at most {le}",
        "finite_number": "must be a finite number",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "int_parsing": "must be a whole number",
        "float_type": "must be a number",
        "float_parsing": "must be a number",
        "bool_type": "must be true or false",
        "bool_parsing": "must be true or false",
        "string_type": "must be text",
        "list_type": "must be a list",
        "tuple_type": "must be a list",
        "dict_type": "must be a set of keys",
        "model_type": "must be a set of keys",
        "model_attributes_type": "must be a set of keys",
        "literal_error": "must be one of {expected}",
        "value_error": "{error}",
    }
    text = texts.get(kind)
    return first["msg"][0].lower() + first["msg"][1:] if text is None else text.format(**context)


def _field_at(cls: type[Settings], path: list[str]) -> FieldInfo | None:
    """Return the field that a path of an error leads to: parts that are no field name kinds of a union."""
    field = None
    for part in path:
        if part not in cls.model_fields:
            continue
        field = cls.model_fields[part]
        cls = next(iter(_settings_in(field.annotation)), cls)
    return field


def _is_key(cls: type[Settings], path: list[str], name: str) -> bool:
    """Whether a part of an error's path is a key of the command line, and not the name of a kind in a union."""
    for part in path:
        field = cls.model_fields.get(part)
        if part == name:
            return field is not None
        if field is not None:
            cls = next(iter(_settings_in(field.annotation)), cls)
    return False


def _siblings(cls: type[Settings], path: list[str]) -> list[str]:
    for part in path[:-1]:
        field = cls.model_fields.get(part)
        if field is not None:
            cls = next(iter(_settings_in(field.annotation)), cls)
    return list(cls.model_fields)


def _settings_in(annotation: Any) -> Iterator[type[Settings]]:
    """Yield the classes of settings in an annotation, such as `Calibration | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for part in get_args(annotation):
        yield from _settings_in(part)


def _described(field: FieldInfo | None) -> str:
    return (field.description or "").rstrip(".") if field is not None else ""


def _shown(value: Any) -> str:
    """Return a value as the command line has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


__all__ = [
    "Count",
    "Flag",
    "NonNegativeNumber",
    "Number",
    "PositiveCount",
    "PositiveNumber",
    "Probability",
    "SettingField",
    "Settings",
    "Share",
    "Text",
    "fields_of",
    "message_of",
    "model_validator",
    "setting",
]
