"""The base of all settings: frozen classes whose fields state a default, a constraint and a
sentence of help in one place.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Self,
    TypeAlias,
    TypedDict,
    TypeVar,
    cast,
    get_args,
)

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

from specheads.errors import UserError, closest

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic._internal._model_construction import ModelMetaclass
    from pydantic_core import CoreSchema, ErrorDetails
else:
    ModelMetaclass = type(BaseModel)  # pydantic has no public name for it

_LARGEST_COUNT = 2**31 - 1  # more objects in memory, or numbered files, are a mistake
_LARGEST_SEED = 2**32 - 1  # the largest that every random generator takes


def number(
    expected: str,
    holds: Callable[[float], bool] = lambda value: True,
    kind: "type[int] | UnionType" = int | float,
) -> PlainValidator:
    """Return a check that does not convert the value: 0 and 0.0 differ in cache keys."""

    def check(value: object) -> float:
        if isinstance(value, kind) and not isinstance(value, bool):
            value = cast(float, value)
            if abs(value) < math.inf and holds(value):
                return value
        raise ValueError(f"must be {expected}")

    return PlainValidator(check)


def count(least: int = 0, most: int = _LARGEST_COUNT) -> PlainValidator:
    """Return a check for integers from `least` to `most`."""
    expected = {0: "a non-negative integer", 1: "a positive integer"}.get(
        least, f"an integer of at least {least}"
    )

    def holds(value: float) -> bool:
        if value > most:
            raise ValueError(f"must be at most {most}")
        return value >= least

    return number(expected, holds, int)


Number = Annotated[float, number("a finite number")]
PositiveNumber = Annotated[float, number("a finite number above 0", lambda value: value > 0)]
NonNegativeNumber = Annotated[
    float, number("a finite number of at least 0", lambda value: value >= 0)
]
Probability = Annotated[float, number("a number from 0 to 1", lambda value: 0 <= value <= 1)]
Count = Annotated[int, count(0)]
PositiveCount = Annotated[int, count(1)]
Seed = Annotated[int, count(0, _LARGEST_SEED)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]

T = TypeVar("T")
OneOrMore: TypeAlias = T | tuple[T, ...]  # one value, or a list of values


class _FromMapping:
    """Lets a field that holds an instance of a plain dataclass take a mapping with the arguments of
    its constructor.
    """

    def __get_pydantic_core_schema__(
        self, source: type, handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        # Its argument is known only here.
        instance = InstanceOf[source]  # type: ignore[valid-type]
        return handler.generate_schema(
            Annotated[instance, BeforeValidator(partial(self.build, source))]
        )

    @staticmethod
    def build(kind: type, value: object) -> object:
        """Return `value`, or an instance of `kind` with the arguments in it.

        Raises ValueError for an unknown argument.
        """
        if not isinstance(value, Mapping):
            return value
        names = [field.name for field in dataclasses.fields(kind)]
        if unknown := [name for name in value if name not in names]:
            raise ValueError(f"has the unknown key {unknown[0]}; the keys are {', '.join(names)}")
        return kind(**value)


Built = Annotated[T, _FromMapping()]  # Built[Warp] is the type of fields that hold a Warp


class _Extra(TypedDict, total=False):
    """What `setting` adds to a field of pydantic; see its arguments."""

    key: str | None
    config: object
    decides: bool


_AS_DEFAULT = object()  # the value of a config is the default of the field


def setting(
    default: object = ...,
    help: str = "",
    *,
    key: str | None = None,
    config: Any = _AS_DEFAULT,
    decides: bool = True,
    **constraints: Any,
) -> Any:
    """Return a field of a class of settings.

    Args:
        default: the value if none is given; without a default, a value must be given.
        help: one sentence about the field.
        key: the key on the command line, if it differs from the name of the field.
        config: the default on the command line, if it differs: "${key}" for the value of another
            key.
        decides: whether the value changes any result of a run; `cache_key` leaves out the other
            fields.
    """
    return Field(
        default,
        description=help,
        json_schema_extra={"key": key, "config": config, "decides": decides},
        **constraints,
    )


class _Checked(ModelMetaclass):
    """Turns a mistake in the arguments of a class of settings into a UserError."""

    def __call__(cls, *args: object, **values: object) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise UserError(_message_of(error, cast(type[Settings], cls))) from None


class Settings(BaseModel, metaclass=_Checked):
    """Base of all settings. Raises UserError for the first mistake."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True
    )

    def but(self, **changes: object) -> Self:
        """Return a copy with other values, which are checked like the first ones."""
        return type(self)(**(self.values() | changes))

    def values(self) -> dict[str, Any]:
        """Return the values by the names of the fields."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return values | (self.model_extra or {})


def config_folder() -> Path:
    """Return the folder of YAML configs: next to the package in a source tree, inside it in an
    installed wheel.
    """
    package = Path(__file__).parent
    source_tree = package.parent / "conf"
    return source_tree if (source_tree / "model").is_dir() else package / "conf"


def argument(default: object, meaning: str, kind: object = None) -> Any:
    """Return a field of a plain dataclass, for `check_arguments` and `fields_of`.

    Args:
        default: the value if none is given; `...`: a value must be given.
        meaning: what it is, in a few words, with an example where that helps.
        kind: the type that it is checked for, if that is not its annotation.
    """
    metadata = {"meaning": meaning, "kind": kind}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_arguments(of: object, prefix: str = "") -> None:
    """Raise UserError for an `argument` of a dataclass that is of another type.

    Other objects have none.
    """
    for name, each in getattr(of, "__dataclass_fields__", {}).items():
        if "meaning" in each.metadata:
            check(
                joined(prefix, name),
                getattr(of, name),
                each.metadata["kind"] or each.type,
                each.metadata["meaning"],
            )


def fields_of(cls: type, prefix: str = "") -> dict[str, str]:
    """Return the keys of a class of settings, or of a plain dataclass (`Built`), with their
    sentences of help.
    """
    if not issubclass(cls, Settings):
        fields = getattr(cls, "__dataclass_fields__")  # noqa: B009
        return {joined(prefix, name): fields[name].metadata.get("meaning", "") for name in fields}
    keys: dict[str, str] = {}
    for name, field in cls.model_fields.items():
        keys[key := joined(prefix, key_of(name, field))] = field.description or ""
        for nested in _classes_in(field.annotation):
            keys |= fields_of(nested, key)
    return keys


def config_of(settings: "type[Settings] | Settings") -> dict[str, object]:
    """Return the defaults of a class of settings, or an instance's values, nested as in a config,
    without strategies' objects.
    """
    values: dict[str, object] = {}
    cls = settings if isinstance(settings, type) else type(settings)
    for name, field in cls.model_fields.items():
        value = _extra(field)["config"]
        if value is _AS_DEFAULT and isinstance(settings, type):
            value = field.get_default(call_default_factory=True)
        elif value is _AS_DEFAULT:
            value = getattr(settings, name)
        plain = _as_config(value)
        if plain is not _NOT_PLAIN:
            *groups, last = key_of(name, field).split(".")
            node: dict[str, Any] = values
            for group in groups:
                node = node.setdefault(group, {})
            node[last] = plain
    return values


_NOT_PLAIN = object()


def _as_config(value: object) -> object:
    if isinstance(value, Settings):
        return config_of(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list | tuple):
        return [_as_config(each) for each in value]
    return value if isinstance(value, bool | int | float | str | Mapping | None) else _NOT_PLAIN


def key_of(name: str, field: FieldInfo) -> str:
    """Return the key of a field on the command line."""
    return _extra(field).get("key") or name


def cache_key(settings: Settings, prefix: str = "") -> dict[str, object]:
    """Return the values that decide results by their keys, those of nested settings too."""
    values: dict[str, object] = {}
    for name, field in type(settings).model_fields.items():
        if not _extra(field).get("decides", True):
            continue
        key = joined(prefix, key_of(name, field))
        value = getattr(settings, name)
        if isinstance(value, Settings):
            values |= cache_key(value, key)
        else:
            values[key] = _plain(value)
    for name, value in (settings.model_extra or {}).items():
        values[joined(prefix, name)] = _plain(value)
    return values


def _plain(value: object) -> object:
    """Return a value.

    For an object, such as a strategy, a text of its class and of its attributes with plain values.
    """
    if isinstance(value, bool | int | float | str | list | tuple | Mapping | None):
        return value
    attributes = {}
    for name, each in vars(value).items():
        if isinstance(each, bool | int | float | str | None):
            attributes[name] = each
    return f"{type(value).__module__}.{type(value).__qualname__}({attributes})"


# What is said of a value by the types of pydantic's errors; of others, pydantic's message.
_EXPECTED = {
    **dict.fromkeys(("int_type", "int_from_float"), "must be an integer"),
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type", "is_instance_of"),
        "must be a set of keys",
    ),
    "too_short": "must not be empty",
    "literal_error": "must be one of {expected}",
    "value_error": "{error}",
}


def _message_of(error: ValidationError, cls: type[Settings]) -> str:
    """Return one message about the first mistake: the key, its value, the expected value, and the
    help of the field.
    """
    errors = error.errors(include_url=False)
    same_field = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    # The closest one of the types of a union.
    first = max(same_field, key=lambda each: len(each["loc"]))
    kind = first["type"]
    context = first.get("ctx", {})
    if isinstance(cause := context.get("error"), UserError):
        return str(cause)
    keys = list[str]()
    field = None
    for part in first["loc"]:  # other parts are numbers in lists, and names of types in a union
        if isinstance(part, str) and part in cls.model_fields:
            field = cls.model_fields[part]
            keys.append(key_of(part, field))
            nested = [each for each in _classes_in(field.annotation) if issubclass(each, Settings)]
            cls = nested[0] if nested else cls
    key = ".".join(keys)
    value = shown(first["input"])
    if kind == "extra_forbidden":
        known = [key_of(*each) for each in cls.model_fields.items()]
        return str(unknown_key(joined(key, str(first["loc"][-1])), first["input"], known))
    about = (field.description or "").rstrip(".") if field is not None else ""
    if about:  # some explain one value after the other ("true: ...")
        about = f" ({about})" if about.partition(" ")[0].endswith(":") else f"; it is {about}"
    if kind == "missing":
        return f"{key} is missing{about}."
    expected = _expected(first)
    return f"{key}={value} {expected}{about}." if key else f"{expected}."


def check(name: str, value: object, kind: object, meaning: str = "") -> None:
    """Raise UserError unless a value is of a type that fields of settings have.

    `meaning` says what it is, with an example.
    """
    try:
        _adapter(kind).validate_python(value)
    except ValidationError as error:
        about = f"; it is {meaning}" if meaning else ""
        raise UserError(
            f"{name}={value} {_expected(error.errors(include_url=False)[0])}{about}."
        ) from None


_adapter = lru_cache(TypeAdapter)  # making one takes longer than what is checked


def _expected(mistake: "ErrorDetails") -> str:
    kind = mistake["type"]
    message = mistake["msg"]
    return (
        _EXPECTED[kind].format(**mistake.get("ctx", {}))
        if kind in _EXPECTED
        else message[0].lower() + message[1:]
    )


def _classes_in(annotation: object) -> Iterator[type]:
    """Yield the classes of settings and the plain dataclasses in an annotation, such as
    `Calibration | None`.
    """
    if isinstance(annotation, type) and (
        issubclass(annotation, Settings) or dataclasses.is_dataclass(annotation)
    ):
        yield annotation
    for part in get_args(annotation):
        yield from _classes_in(part)


def _extra(field: FieldInfo) -> _Extra:
    given = field.json_schema_extra
    return cast(_Extra, given) if isinstance(given, Mapping) else {}


def joined(prefix: str, key: str) -> str:
    """Return a key below another one."""
    return f"{prefix}.{key}" if prefix else key


def unknown_key(key: str, value: object, known: Iterable[str]) -> UserError:
    """Return the error about a key that is not among those that are known."""
    known = list(known)
    meant = closest(key.rpartition(".")[2], known)
    return UserError(
        f"{key}={shown(value)} is not known; {meant}expected one of {', '.join(known)}."
    )


def shown(value: object) -> str:
    """Return a value as the command line has it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    return str(value)


_SECRET = r"(?:api|access)[_-]?key|password|secret|(?:api|access|auth|hf)[_-]?token"
_IS_SECRET = re.compile(_SECRET, re.IGNORECASE)
_IN_ADDRESS = re.compile(
    rf"://[^/\s?#]*@|[?&](?:{_SECRET}|key|token|sig|signature)=", re.IGNORECASE
)


def secrets_in(values: object, key: str = "") -> Iterator[str]:
    """Yield the keys of nested values under which a password or another secret is."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from secrets_in(value, joined(key, str(name)))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from secrets_in(value, key)
    elif isinstance(values, str) and values:
        is_named = _IS_SECRET.fullmatch(key.rpartition(".")[2])
        if is_named or _IN_ADDRESS.search(values):
            yield key
