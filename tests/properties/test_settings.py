"""Every field of every class of settings keeps a value of its type as it is, and refuses any other
by the name of its key; each type of values takes exactly what its name says.
"""

import importlib
import math
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties.strategies import tries
from pydantic import TypeAdapter, ValidationError

import specheads
from specheads import settings as types
from specheads.errors import UserError
from specheads.evaluation.keys import Ratio, Threshold
from specheads.settings import Settings, key_of

for info in pkgutil.walk_packages(specheads.__path__, "specheads."):
    if not info.name.endswith("__main__"):
        importlib.import_module(info.name)


def subclasses(cls):
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


CLASSES = sorted((cls for cls in subclasses(Settings) if "specheads" in cls.__module__), key=str)
REQUIRED = {"_Model": {"model": {"draft": "a", "target": "b"}}, "Export": {"head": "x"}}
OBJECTS = ("drafting", "verification", "stopping", "test_sets")  # made by other code
EDGES = [0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**16, 2**16 + 1, 0.0, -0.0, 1.0, 1.5]
EDGES += [-1e-300, 1 + 1e-15, 1e400, math.nan, None, True, False, "", "auto", "1", "true"]
scalars = st.sampled_from(EDGES) | st.integers() | st.floats() | st.text(max_size=4)
# Objects of no field's type, too.
anything = (
    scalars
    | st.lists(scalars, max_size=3).map(tuple)
    | st.sampled_from([{}, {"unheard": 1}, {"0": 0}, object(), b"1", 1j])
)


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value, least=0, most=2**31 - 1):
    return is_number(value) and isinstance(value, int) and least <= value <= most


TYPES = {
    types.Number: is_number,
    types.PositiveNumber: lambda value: is_number(value) and value > 0,
    types.NonNegativeNumber: lambda value: is_number(value) and value >= 0,
    types.Probability: lambda value: is_number(value) and 0 <= value <= 1,
    types.Count: is_count,
    types.PositiveCount: lambda value: is_count(value, 1),
    types.Seed: lambda value: is_count(value, most=2**32 - 1),
    types.Flag: lambda value: isinstance(value, bool),
    types.Text: lambda value: isinstance(value, str),
    Threshold: lambda value: value == "auto" or (is_number(value) and 0 <= value <= 1),
    Ratio: lambda value: is_number(value) and value > 1,
}


@pytest.mark.parametrize(("kind", "contains"), TYPES.items())
@tries(1)
@given(value=anything)
def test_a_type_takes_what_its_name_says_and_keeps_it(kind, contains, value):
    try:
        kept = TypeAdapter(kind).validate_python(value)
    except ValidationError:
        assert not contains(value)
    else:
        assert contains(value) and kept == value and type(kept) is type(value)


BY_CHECK = {kind.__metadata__: contains for kind, contains in TYPES.items()}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@tries(0.6)
@given(st.data())
def test_a_value_is_kept_or_refused_by_the_name_of_a_key(cls, data):
    keys = [key_of(name, field) for name, field in cls.model_fields.items()]
    for name, field in cls.model_fields.items():
        if name in OBJECTS:
            continue
        value = data.draw(anything, label=name)
        contains = BY_CHECK.get(tuple(field.metadata), lambda value: True)
        try:
            made = cls(**REQUIRED.get(cls.__name__, {}) | {name: value})
        except UserError as error:
            message = str(error)
            # A value that contradicts others is refused by a message about them.
            assert any(key in message for key in keys)
            continue
        kept = getattr(made, name)
        assert contains(value)
        assert (
            kept is value
            or kept == value
            or (key_of(name, field) == "warp" and not value)
            or value == {}
        )
        assert made.but() == made == cls(**made.values())


def test_no_class_takes_a_key_that_it_does_not_know():
    assert len(CLASSES) > 20
    for cls in CLASSES:
        if cls.model_config["extra"] == "forbid":
            with pytest.raises(UserError, match="^unheard=1 is not known; .*expected one of"):
                cls(**REQUIRED.get(cls.__name__, {}) | {"unheard": 1})
