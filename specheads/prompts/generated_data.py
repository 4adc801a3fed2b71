"""A generated data set: its folder and its prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specheads.prompts.encoding import ResponseLimits
from specheads.prompts.prompt import Prompt


@dataclass(frozen=True)
class GeneratedData:
    """The folder of a complete data set, its prompts with their groups, and the limits of its responses."""

    folder: Path
    prompts: Sequence[Prompt]
    limits: ResponseLimits = field(default_factory=ResponseLimits)
