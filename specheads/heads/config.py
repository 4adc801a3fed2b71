"""The config of a head: everything that decides what it computes and for which models; a head folder's config.json."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from specheads.errors import UserError, is_count, is_number
from specheads.heads.calibration import IndexCalibration
from specheads.heads.features import FEATURES, input_size

FORMAT_VERSION = 2
FORMER_KEYS = ("overlap", "overlap_calibration", "target_size")  # of earlier heads, whose networks had more inputs or outputs
DEFAULT_INPUTS = {"input_token": ("hidden",), "next_token": ("hidden", "embedding", "draft_prob", "max_prob", "entropy")}
KNOWN_INPUTS = {kind: tuple(name for name, feature in FEATURES.items() if kind in feature.heads) for kind in DEFAULT_INPUTS}
# A look-ahead head is projected down to an eighth of the draft's width, within these bounds: it runs in every draft step, and
# widths from 8 to 40 decided equally well on nano (docs/measurements/archive.md, kinds of heads).
NEXT_TOKEN_SHARE, LEAST_WIDTH, LARGEST_WIDTH = 8, 8, 256
LARGEST_SIZE, LARGEST_DEPTH = 2**20, 1000  # larger ones are damage, and would take all memory before anything noticed


@dataclass(frozen=True)
class HeadConfig:
    """Everything that decides what a head computes and for which models.

    Raises:
        UserError: a value that is not known, or a size that is not positive.
    """

    hidden_size: int
    depth: int = 3
    predicts: str = "next_token"
    inputs: tuple[str, ...] = ()
    width: int | None = None
    embedding_size: int | None = None
    # Number of tokens in the distribution that features are computed from; a draft may have padded logits beyond them.
    vocab_size: int | None = None
    label: str = "sampled"
    tap: str = "output_embedding_input"
    warp: Mapping[str, float] = field(default_factory=dict)
    draft: Mapping[str, str] = field(default_factory=dict)
    target: Mapping[str, str] = field(default_factory=dict)
    calibration: Mapping[str, Any] | None = None  # IndexCalibration's; stopping rules apply it, the head returns raw logits
    recommended: Mapping[str, Any] | None = None
    train: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Check the values and fill in the defaults that depend on others."""
        for name, (expected, holds) in _EXPECTED.items():
            if not holds(value := getattr(self, name)):
                raise UserError(f"the head's {name}={value!r} must be {expected}.")
        inputs, known = tuple(self.inputs) or DEFAULT_INPUTS[self.predicts], KNOWN_INPUTS[self.predicts]
        if unknown := [name for name in inputs if name not in known]:
            raise UserError(
                f"head.inputs names {unknown[0]!r}; a head with predicts={self.predicts} can read {', '.join(known)}."
            )
        narrow = min(max(self.hidden_size // NEXT_TOKEN_SHARE, LEAST_WIDTH), LARGEST_WIDTH)
        default_width = self.hidden_size if self.predicts == "input_token" else narrow
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "width", self.width or default_width)
        object.__setattr__(self, "embedding_size", self.embedding_size or self.hidden_size)

    @property
    def input_size(self) -> int:
        return input_size(self.inputs, vars(self))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"inputs": list(self.inputs)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> "HeadConfig":
        """Read the content of a config.json.

        No key names a file: whatever a config says, a head is read from the files of its folder.

        Raises:
            UserError: another format, keys that are unknown or missing, values that are not allowed; the message begins with
                `where`.
        """
        if not isinstance(values, Mapping):
            raise UserError(f"{where} must be a JSON object; export the head again.")
        if {"model_type", "architectures"} & values.keys():
            raise UserError(
                f"{where} belongs to a model, not to a head; give the folder of a head, which specheads train exports."
            )
        if (version := values.get("format_version")) != FORMAT_VERSION:
            raise UserError(
                f"{where} has head format {version!r}; this version reads {FORMAT_VERSION}. Update specheads or train it again."
            )
        values = {key: value for key, value in values.items() if key not in FORMER_KEYS}
        known = {f.name for f in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise UserError(f"{where} has the unknown key {unknown[0]!r}; it was not written by this version of specheads.")
        if missing := sorted({"hidden_size", "depth", "predicts", "inputs", "width"} - values.keys()):
            raise UserError(f"{where} lacks the key {missing[0]!r}; export the head again.")
        IndexCalibration.from_dict(values.get("calibration"), where)
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def _is(*kinds: type) -> Callable[[object], bool]:
    """Return a check for values of some types; truth values are no numbers."""
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


_is_text, _is_real = _is(str), _is(int, float)  # real numbers may be NaN: some metrics are not defined on few tokens


def _is_size(value: object) -> bool:
    return is_count(value, least=1) and value <= LARGEST_SIZE


def _or_none(holds: Callable[[Any], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or holds(value)


def _is_set_of(holds: Callable[[Any], bool]) -> Callable[[object], bool]:
    """Return a check for mappings whose values pass a check."""
    return lambda value: isinstance(value, Mapping) and all(map(holds, value.values()))


_SIZE = f"a positive integer of at most {LARGEST_SIZE}"
# What the card reads of the training.
_TRAIN = {"num_prompts": is_count, "num_responses": is_count, "test": _is_set_of(_is_real), "dev_ece": _is_set_of(_is_real)}
# What each value must be, and whether it is.
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "hidden_size": (_SIZE, _is_size),
    **dict.fromkeys(("embedding_size", "vocab_size", "width"), (f"{_SIZE}, or null", _or_none(_is_size))),
    "depth": (
        f"0 (a linear head) or a positive integer of at most {LARGEST_DEPTH}, the number of residual blocks",
        lambda value: is_count(value) and value <= LARGEST_DEPTH,
    ),
    "predicts": (f"one of {', '.join(KNOWN_INPUTS)}", lambda value: _is_text(value) and value in KNOWN_INPUTS),
    **dict.fromkeys(("label", "tap"), ("text", _is_text)),
    **dict.fromkeys(("draft", "target"), ("a set of texts", _is_set_of(_or_none(_is_text)))),
    "inputs": ("a list of features", lambda value: isinstance(value, list | tuple) and all(map(_is_text, value))),
    "warp": ("a set of numbers", _is_set_of(is_number)),
    "recommended": ("a set of numbers and texts, or null", _or_none(_is_set_of(lambda each: is_number(each) or _is_text(each)))),
    "train": (
        "a set of values, with counts of prompts and numbers in test and dev_ece",
        lambda train: isinstance(train, Mapping) and all(_or_none(holds)(train.get(name)) for name, holds in _TRAIN.items()),
    ),
}
