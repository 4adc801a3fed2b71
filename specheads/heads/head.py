"""The acceptance head: a small residual network on the draft's hidden state that says how likely a token is accepted.

Two kinds. `predicts=input_token` (SpecDec++): the state that has consumed y_i judges y_i, one draft forward after it was
sampled. `predicts=next_token` (look-ahead): the state that y_i was sampled from, y_i's embedding and the draft's certainty
judge y_i before that forward is spent.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor

from specheads.errors import UserError, is_count
from specheads.heads.calibration import IndexCalibration
from specheads.heads.portable.network import Network
from specheads.heads.train_prompts import TrainPrompts
from specheads.pair import Pair

FORMAT_VERSION = 2  # format 1 calls `predicts` `judges`
# What a kind may see. At the position that has read y_i, token features are already those of y_{i+1}, which training does not
# know: a head that judges its input token has only the state and the shape of the next law.
# What is known of a round beside its tokens: the judged token's index in it, from 0, and the target's hidden state that the token
# before the round was decided from, zeros where there is none.
ROUND_INPUTS = ("index", "target_hidden")
DEFAULT_INPUTS = {"input_token": ("hidden",), "next_token": ("hidden", "embedding", "draft_prob", "max_prob", "entropy")}
KNOWN_INPUTS = {
    "input_token": ("hidden", "max_prob", "entropy", "index"),
    "next_token": DEFAULT_INPUTS["next_token"] + ROUND_INPUTS,
}
# A look-ahead head is projected down to an eighth of the draft's width, within these bounds: it is paid for in every draft step, and
# widths from 8 to 40 decided equally well on nano (benchmarks/README.md, kinds of heads).
NEXT_TOKEN_SHARE, LEAST_WIDTH, LARGEST_WIDTH = 8, 8, 256


@dataclass(frozen=True)
class HeadConfig:
    """Everything that decides what a head computes and for whom; the content of `config.json`."""

    hidden_size: int
    depth: int = 3
    predicts: str = "next_token"
    inputs: tuple[str, ...] = ()
    width: int | None = None
    embedding_size: int | None = None
    target_size: int | None = None  # of the target's hidden state, where that is an input
    # Tokens of which draft_prob, max_prob and entropy speak; a draft may have padded logits beyond them.
    vocab_size: int | None = None
    label: str = "sampled"
    tap: str = "output_embedding_input"
    warp: Mapping[str, float] = field(default_factory=dict)
    draft: Mapping[str, str] = field(default_factory=dict)
    target: Mapping[str, str] = field(default_factory=dict)
    calibration: Mapping[str, Any] | None = None  # of IndexCalibration; stopping rules apply it, the head gives raw logits
    recommended: Mapping[str, float] | None = None
    train: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.predicts not in KNOWN_INPUTS:
            raise UserError(f"head.predicts={self.predicts!r} is not known; use one of {', '.join(KNOWN_INPUTS)}.")
        if not is_count(self.depth):
            raise UserError(f"head.depth={self.depth} is no count; use 0 (linear) or more residual blocks.")
        if self.width is not None and not is_count(self.width, least=1):
            raise UserError(f"head.width={self.width} is no count of at least 1; use null for the usual width.")
        inputs = tuple(self.inputs) or DEFAULT_INPUTS[self.predicts]
        known = KNOWN_INPUTS[self.predicts]
        if unknown := [name for name in inputs if name not in known]:
            raise UserError(f"head.inputs names {unknown[0]!r}; a head with predicts={self.predicts} can see {', '.join(known)}.")
        if "target_hidden" in inputs and not is_count(self.target_size, least=1):
            raise UserError(
                f"target_size={self.target_size} is no count, but the head reads the target's hidden state; give its size."
            )
        narrow = min(max(self.hidden_size // NEXT_TOKEN_SHARE, LEAST_WIDTH), LARGEST_WIDTH)
        default_width = self.hidden_size if self.predicts == "input_token" else narrow
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "width", self.width or default_width)
        object.__setattr__(self, "embedding_size", self.embedding_size or self.hidden_size)

    @property
    def input_size(self) -> int:
        """Numbers that enter the network."""
        sizes = {"hidden": self.hidden_size, "embedding": self.embedding_size, "target_hidden": self.target_size}
        return sum(sizes.get(name, 1) for name in self.inputs)

    @property
    def projected(self) -> bool:
        """Whether a linear layer comes before the blocks."""
        return self.predicts == "next_token" or self.input_size != self.width

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"inputs": list(self.inputs)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> "HeadConfig":
        """Read `config.json`; raises UserError for a newer format or keys that are unknown or missing."""
        if {"model_type", "architectures"} & values.keys():
            raise UserError(f"{where} is a model's, not a head's; give the folder of a head, which train.py exports.")
        version = values.get("format_version")
        if version == 1:
            values = {"predicts" if key == "judges" else key: value for key, value in values.items()}
        elif version != FORMAT_VERSION:
            raise UserError(
                f"{where} has head format {version!r}; this version reads 1 to {FORMAT_VERSION}. Update specheads or export the head again."
            )
        known = {f.name for f in fields(cls)}
        if strange := sorted(values.keys() - known):
            raise UserError(f"{where} has the unknown key {strange[0]!r}; it was not written by this version of specheads.")
        if missing := sorted({"hidden_size", "depth", "predicts", "inputs", "width"} - values.keys()):
            raise UserError(f"{where} lacks the key {missing[0]!r}; export the head again.")
        IndexCalibration.from_dict(values.get("calibration"), where)
        return cls(**{**values, "inputs": tuple(values["inputs"]), "format_version": FORMAT_VERSION})


class AcceptanceHead(Network, PyTorchModelHubMixin):
    """A network that knows its config. Computes in float32 (SpecDec++, section 3.2).

    `save_pretrained`, `from_pretrained` and `push_to_hub` are huggingface_hub's; their folder is that of `save_head`.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config.inputs, config.input_size, config.width, config.depth, config.projected)
        self.config = config
        self.golden_inputs: Tensor | None = None  # (N, input_size) that a loaded head was checked on
        self.train_prompts: TrainPrompts | None = None  # None: not known, as of heads that were exported before they were kept

    def _save_pretrained(self, save_directory: Path) -> None:
        from specheads.heads.checkpoint import save_head  # which knows heads

        save_head(self, save_directory)

    @classmethod
    def from_pretrained(cls, location: str | Path, *, any_draft: bool = False, **hub: Any) -> "AcceptanceHead":
        """Return the head of a folder or hub id; see load_head, whose errors it raises."""
        from specheads.heads.checkpoint import load_head

        return load_head(location, any_draft, **hub)

    def extra_repr(self) -> str:
        """Return what the layers do not show; names of compiled code depend on it."""
        weight = self.readout.weight
        return f"predicts={self.config.predicts}, inputs={self.config.inputs}, {weight.dtype}, {weight.device}, training={self.training}"

    @torch.no_grad()
    def standardise(self, inputs: Tensor) -> None:
        """Fix the shift and scale of the inputs from a sample (N, input_size), so that all enter with unit variance."""
        self.input_mean.copy_(inputs.mean(dim=0))
        self.input_scale.copy_(1 / inputs.std(dim=0).clamp_min(1e-6))

    def check_fits(self, pair: Pair) -> None:
        """Raise UserError unless this head was trained on the pair's draft, and its target if it reads that, as they are now."""
        size = pair.draft_lm.hidden_size
        if self.config.hidden_size != size:
            raise UserError(
                f"the head reads hidden states of size {self.config.hidden_size}, but the draft {pair.draft_id} has size {size}; "
                f"it was trained for {self.config.draft.get('id', 'another draft')}. Train one for this pair: python train.py model=..."
            )
        here = {"draft": (pair.draft_id, pair.draft_revision)}
        if "target_hidden" in self.config.inputs:
            here["target"] = (pair.target_id, pair.target_revision)
        for role, (name, revision) in here.items():
            self.check_trained_for(role, name, revision)

    def check_trained_for(self, role: str, name: str, revision: str) -> None:
        """Raise UserError unless this is the draft or target, by `role`, that this head was trained for, or it does not say."""
        trained = dict(getattr(self.config, role))
        if trained and trained.get("revision") != revision:
            raise UserError(
                f"the head was trained for {role} {trained.get('id')} at revision {trained.get('revision')}, but this pair's {role} is "
                f"{name} at revision {revision}; load that {role}, or train a head for this one: python train.py model=... "
                "To take it nevertheless: any_draft=true."
            )
