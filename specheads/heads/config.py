"""The config of a head: everything that decides what it computes and for which models.

A head folder's config.json.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Strict

from specheads.errors import UserError, is_number
from specheads.settings import Count, Number, Text, check, count

FORMAT_VERSION = 2
DEFAULT_INPUTS = {
    "input_token": ("hidden",),
    "next_token": ("hidden", "embedding", "draft_prob", "max_prob", "entropy"),
}
# At the position that has read y_i, features of the token are already those of y_{i+1}, which
# training does not know: an `input_token` head may read only the state and the distribution of the
# next token. features.py computes each.
KNOWN_INPUTS = {
    "input_token": ("hidden", "max_prob", "entropy", "second_prob", "depth"),
    "next_token": (
        "hidden",
        "embedding",
        "draft_prob",
        "max_prob",
        "entropy",
        "second_prob",
        "depth",
    ),
}
# Of a draft that reads its target, next to the default ones
READING_INPUTS = ("depth",)
# A look-ahead head is projected down to an eighth of the draft's width, within these bounds: it
# runs in every draft step, and widths from 8 to 40 decided equally well on nano
# (docs/measurements/archive.md, kinds of heads).
NEXT_TOKEN_SHARE = 8
LEAST_WIDTH = 8
LARGEST_WIDTH = 256
# Larger ones are damage, and would take all memory before anything noticed
LARGEST_SIZE = 2**20
LARGEST_DEPTH = 1000
_WRITTEN = {"hidden_size", "depth", "predicts", "inputs", "width"}  # keys of every config.json
_Size = Annotated[int, count(1, LARGEST_SIZE)]
_Real = Annotated[float, Strict()]  # may be NaN: some metrics are not defined on few tokens


class _Training(BaseModel):
    """What the card reads of the training."""

    num_prompts: Count | None = None
    num_responses: Count | None = None
    test: Mapping[str, _Real] | None = None
    dev_ece: Mapping[str, _Real] | None = None
    dev_log_loss: Mapping[str, _Real] | None = None


@dataclass(frozen=True)
class HeadConfig:
    """Everything that decides what a head computes and for which models.

    Raises UserError for values that are not allowed.
    """

    hidden_size: _Size
    depth: Annotated[int, count(0, LARGEST_DEPTH)] = (
        3  # the number of residual blocks; 0: a linear head
    )
    predicts: Literal["next_token", "input_token"] = "next_token"
    inputs: tuple[Text, ...] = ()
    width: _Size | None = None
    embedding_size: _Size | None = None
    # Number of tokens in the distribution that features are computed from; a draft may have padded
    # logits beyond them.
    vocab_size: _Size | None = None
    label: Text = "sampled"
    tap: Text = "output_embedding_input"
    warp: Mapping[str, Number] = field(default_factory=dict)
    draft: Mapping[str, Text | None] = field(default_factory=dict)
    target: Mapping[str, Text | None] = field(default_factory=dict)
    calibration: Mapping[str, Any] | None = (
        None  # IndexCalibration's; stopping rules apply it, the head returns raw logits
    )
    recommended: Mapping[str, Any] | None = field(
        default=None, metadata={"kind": Mapping[str, Number | Text] | None}
    )
    train: Mapping[str, Any] = field(default_factory=dict, metadata={"kind": _Training})
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for each in fields(self):
            check(
                f"the head's {each.name}",
                getattr(self, each.name),
                each.metadata.get("kind", each.type),
            )
        inputs = tuple(self.inputs) or DEFAULT_INPUTS[self.predicts]
        known = KNOWN_INPUTS[self.predicts]
        if unknown := [name for name in inputs if name not in known]:
            raise UserError(
                f"head.inputs names {unknown[0]!r}; a head with predicts={self.predicts} can read"
                f" {', '.join(known)}."
            )
        narrow = min(max(self.hidden_size // NEXT_TOKEN_SHARE, LEAST_WIDTH), LARGEST_WIDTH)
        default_width = self.hidden_size if self.predicts == "input_token" else narrow
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "width", self.width or default_width)
        object.__setattr__(self, "embedding_size", self.embedding_size or self.hidden_size)

    @property
    def input_size(self) -> int:
        from specheads.heads.features import input_size  # it imports torch, as all who ask this

        return input_size(self.inputs, vars(self))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"inputs": list(self.inputs)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "HeadConfig":
        """Read the content of a config.json, which names no files.

        Raises ValueError for another's.
        """
        if not isinstance(values, Mapping) or {"model_type", "architectures"} & values.keys():
            raise ValueError("its config is not that of a head; give the folder of a head")
        if (version := values.get("format_version")) != FORMAT_VERSION:
            raise ValueError(f"it has head format {version!r}; this version reads {FORMAT_VERSION}")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"its config has the unknown key {unknown[0]!r}")
        if missing := sorted(_WRITTEN - values.keys()):
            raise ValueError(f"its config lacks the key {missing[0]!r}")
        check_calibration(values.get("calibration"))
        return cls(**values)


def check_calibration(values: Mapping[str, Any] | None) -> None:
    """Raise UserError unless `values` are those of a calibration by index, or None."""
    if values is None:
        return
    known = isinstance(values, Mapping) and values.keys() == {"slope", "intercept"}
    if (
        not known
        or not all(map(_are_numbers, values.values()))
        or len(values["slope"]) != len(values["intercept"])
    ):
        raise UserError(
            f"the calibration {values!r} must be slope and intercept, lists of finite numbers"
            " of the same length, one for each index in a round."
        )


def _are_numbers(values: object) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) > 0
        and all(is_number(x) and abs(x) < float("inf") for x in values)
    )
