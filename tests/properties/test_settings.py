"""Every field of every class of settings: a value outside its constraint is refused by the name of
its key, any other is kept.
"""

import importlib
import inspect
import math
import pkgutil
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties.strategies import tries, warps
from pydantic import PlainValidator, Strict
from pydantic.fields import FieldInfo

import specheads
from specheads import settings as module
from specheads.errors import UserError
from specheads.evaluation.settings import EngineName, Ratio, Threshold
from specheads.pair.generation_config import Warped
from specheads.pair.sampling import Warp
from specheads.settings import Settings, _FromMapping, key_of

for info in pkgutil.walk_packages(specheads.__path__, "specheads."):
    if not info.name.endswith("__main__"):
        importlib.import_module(info.name)


def subclasses(cls):
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


CLASSES = sorted(
    (cls for cls in subclasses(Settings) if cls.__module__.startswith("specheads")), key=str
)
REQUIRED = {
    "_Model": {"model": {"draft": "a", "target": "b"}},
    "Export": {"head": "x"},
    "Method": {"name": "a"},
    "Comparison": {"of": ["a"]},
    "Claim": {
        "of": ["a"],
        "claims": ["c"],
        "says": "more",
        "metric": "discard_rate",
        "expected": "more",
    },
}


@dataclass(frozen=True)
class Domain:
    """The values that a field may have."""

    inside: st.SearchStrategy
    contains: Callable[[Any], bool]


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def numbers(holds, least=-1e6, most=1e6, **bounds):
    inside = st.floats(least, most, **bounds) | st.integers(math.ceil(least), math.floor(most))
    return Domain(inside.filter(holds), lambda value: is_number(value) and holds(value))


def integers(least, most):
    return Domain(
        st.integers(least, most) | st.sampled_from([least, most]),
        lambda value: (
            isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        ),
    )


NUMBERS = {
    "Number": numbers(lambda value: True),
    "PositiveNumber": numbers(lambda value: value > 0, 0),
    "NonNegativeNumber": numbers(lambda value: value >= 0, 0),
    "Probability": numbers(lambda value: 0 <= value <= 1, 0, 1),
}
BY_CHECK = {getattr(module, name).__metadata__[0].func: domain for name, domain in NUMBERS.items()}
ENGINES = ("auto", "compiled", "cuda_graph", "eager")
BY_LAST_CHECK = {
    Threshold.__metadata__[-1].func: Domain(
        NUMBERS["Probability"].inside | st.just("auto"),
        lambda value: (
            (isinstance(value, str) and value == "auto") or NUMBERS["Probability"].contains(value)
        ),
    ),
    Ratio.__metadata__[-1].func: numbers(lambda value: value > 1, 1),
    Warped.model_fields["warp"].metadata[-1].func: Domain(
        warps, lambda value: value is None or value == {}
    ),
    EngineName.__metadata__[-1].func: Domain(
        st.sampled_from(["auto", "eager"]),
        lambda value: isinstance(value, str) and value in ENGINES,
    ),
}


def domain_of(annotation: Any, constraints: tuple[Any, ...] = ()) -> Domain | None:
    """Return the values of a type, or None for those of other objects, and where more than the type
    decides.
    """
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        inside = [
            part
            for each in more
            for part in (each.metadata if isinstance(each, FieldInfo) else [each])
        ]
        return domain_of(inner, (*inside, *constraints))
    if constraints and (check := getattr(constraints[-1], "func", None)) in BY_LAST_CHECK:
        return BY_LAST_CHECK[check]
    if len(constraints) > 1:
        return None
    match constraints:
        case [PlainValidator(func=check)] if check in BY_CHECK:
            return BY_CHECK[check]
        case [PlainValidator(func=check)]:
            bounds = inspect.getclosurevars(
                inspect.getclosurevars(check).nonlocals["holds"]
            ).nonlocals
            return integers(bounds["least"], bounds["most"])
        case [Strict()] if annotation is bool:
            return Domain(st.booleans(), lambda value: isinstance(value, bool))
        case [Strict()] if annotation is str:
            return Domain(st.text(max_size=5), lambda value: isinstance(value, str))
        case [_FromMapping()] if annotation is Warp:
            return Domain(warps, lambda value: value == {})
        case [_]:
            return None
    return composed(annotation)


def composed(annotation: Any) -> Domain | None:
    """Return the values of a type that is made of others."""
    parts = get_args(annotation)
    if annotation is types.NoneType:
        return Domain(st.none(), lambda value: value is None)
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return (
            None
            if annotation.__name__ in REQUIRED
            else Domain(st.builds(annotation), lambda value: value == {})
        )
    if get_origin(annotation) is Literal:
        return Domain(
            st.sampled_from(parts), lambda value: isinstance(value, str) and value in parts
        )
    if get_origin(annotation) in (Union, types.UnionType) and all(
        domains := [domain_of(part) for part in parts]
    ):
        return Domain(
            st.one_of(each.inside for each in domains),
            lambda value: any(each.contains(value) for each in domains),
        )
    if get_origin(annotation) is tuple and parts[1:] == (...,) and (domain := domain_of(parts[0])):
        return Domain(
            st.lists(domain.inside, max_size=4).map(tuple),
            lambda value: isinstance(value, list | tuple) and all(map(domain.contains, value)),
        )
    return None


DOMAINS = {
    (cls, name): domain
    for cls in CLASSES
    for name, field in cls.model_fields.items()
    if (domain := domain_of(field.annotation, tuple(field.metadata)))
}
edges = [
    0,
    1,
    -1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**16,
    2**16 + 1,
    0.0,
    -0.0,
    1.0,
    1.5,
    -1e-300,
    1 + 1e-15,
    1e400,
    math.nan,
]
scalars = (
    st.sampled_from([*edges, None, True, False, "", "auto", "1", "true"])
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
)
# Objects of no field's type, too. A list is refused wherever one of its values is.
anything = (
    scalars
    | st.lists(scalars, max_size=3)
    | st.sampled_from([{}, {"unheard": 1}, {"0": 0}, object(), b"1", 1j])
)


def arguments(cls):
    return REQUIRED.get(cls.__name__, {})


def made_or_error(cls, values):
    """Return the settings, or the error that refuses them."""
    try:
        return cls(**arguments(cls) | values)
    except UserError as error:
        return error


def test_most_fields_have_a_constraint_that_is_tried_here():
    count = sum(len(cls.model_fields) for cls in CLASSES)
    assert len(CLASSES) > 20 and len(DOMAINS) > 0.8 * count


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@tries(0.4)
@given(st.data())
def test_a_value_outside_is_refused_by_the_name_of_its_key(cls, data):
    for (owner, name), domain in DOMAINS.items():
        if owner is not cls:
            continue
        value = data.draw(
            anything.filter(lambda value, domain=domain: not domain.contains(value)), label=name
        )
        with pytest.raises(UserError) as caught:
            cls(**arguments(cls) | {name: value})
        key = key_of(name, cls.model_fields[name])
        assert str(caught.value).startswith((f"{key}=", f"{key}.")), str(caught.value)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@tries(0.4)
@given(st.data())
def test_a_value_inside_is_kept_unless_it_contradicts_others(cls, data):
    keys = [key_of(name, field) for name, field in cls.model_fields.items()]
    for (owner, name), domain in DOMAINS.items():
        if owner is not cls:
            continue
        value = data.draw(domain.inside, label=name)
        made = made_or_error(cls, {name: value})
        if isinstance(made, UserError):
            assert any(key in str(made) for key in keys), str(made)
            continue
        kept = getattr(made, name)
        assert kept == value and type(kept) is type(value)
        assert made.but() == made == cls(**made.values())


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@tries(0.2)
@given(st.text(max_size=8), scalars)
def test_a_key_that_is_not_known_is_named_with_those_that_are(cls, name, value):
    if name in cls.model_fields or cls.model_config["extra"] != "forbid" or name == "self":
        return
    with pytest.raises(UserError) as caught:
        cls(**arguments(cls) | {name: value})
    assert str(caught.value).startswith(f"{name}=") and "is not known; expected one of" in str(
        caught.value
    )
