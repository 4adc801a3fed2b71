"""The source of prompts that the keys of `data` describe."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from specheads.errors import UserError
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.nano_source import NanoSource

LIMITS = ("max_new_tokens", "max_prompt_tokens")  # keys of `data` that are the responses', not the source's


def prompt_source(data: Mapping[str, Any]) -> NanoSource | DatasetSource:
    """Return the source of the keys of `data`: a data set where it has a `path`, functions of the standard library otherwise.

    Raises:
        UserError: a key that the source does not have, or a key that is missing.
    """
    kind = source_class(data)
    values = {name: value for name, value in data.items() if name not in LIMITS}
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in values if name not in known]:
        raise UserError(f"data.{unknown[0]}={values[unknown[0]]} is not known; expected one of {', '.join([*known, *LIMITS])}.")
    try:
        return kind(**values)
    except TypeError as error:
        raise UserError(f"data: {str(error).partition(' ')[2]}; give them, or choose a prompt set with data=.") from None


def source_class(data: Mapping[str, Any]) -> type[NanoSource] | type[DatasetSource]:
    """Return the class of the source of the keys of `data`."""
    return DatasetSource if "path" in data else NanoSource
