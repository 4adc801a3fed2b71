"""The names of engines, which settings check without importing any."""

import os

from specheads.errors import UserError

_ENGINES = ("eager", "compiled", "cuda_graph")


def resolve_engine(name: str) -> str:
    """Return `name`, or for `auto` the environment's engine if it names one.

    Raises UserError for an unknown engine.
    """
    name = os.environ.get("SPECHEADS_ENGINE") or name if name == "auto" else name
    if name not in ("auto", *_ENGINES):
        raise UserError(f"engine={name} must be one of auto, {', '.join(_ENGINES)}.")
    return name
