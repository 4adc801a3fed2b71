"""The policies of conf/stopping, which decide for requests that are decoded together: what a config says of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specheads.decoding.batch.load_aware import LengthPolicy, LoadAware, LoadCosts, SecondsTable
from specheads.errors import UserError

# Acceptable values in place of those that are measured.
MEASURED = {"costs": LoadCosts(SecondsTable((1, 2), (1.0, 1.0)), SecondsTable((1, 2), (1.0, 1.0))), "survival": [1.0]}


@dataclass(frozen=True)
class PolicyChoice:
    """A class of policies and its arguments; `costs` and `survival` are measured."""

    cls: Callable[..., LengthPolicy]
    arguments: Mapping[str, Any] = field(default_factory=dict)


Policies = Mapping[str, PolicyChoice]
DEFAULT: Policies = {"load_aware": PolicyChoice(LoadAware)}  # of batches, if none is named


def check_policies(policies: Policies, concurrency: Sequence[int]) -> None:
    """Raise UserError for arguments that a policy refuses, and for policies where requests are decoded one at a time."""
    for name, choice in policies.items():
        try:
            choice.cls(**MEASURED, **choice.arguments)
        except UserError as error:
            raise UserError(f"stopping.{name}.{error}") from None
        except TypeError as error:
            raise UserError(f"stopping.{name} has arguments that its class does not take ({error}); see --help.") from None
    if policies and not concurrency:
        names = list(policies)
        raise UserError(
            f"stopping names {names[0]}, which decides for requests that are decoded together; say how many, for example "
            "specheads evaluate 'concurrency=[1,4,16,64]', or leave it out of stopping=."
        )
