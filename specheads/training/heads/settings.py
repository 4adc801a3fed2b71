"""The settings of head training, and the heads that they describe: one for each combination of
values in lists.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, model_validator

from specheads.errors import UserError
from specheads.heads.config import DEFAULT_INPUTS, KNOWN_INPUTS, READING_INPUTS, HeadConfig
from specheads.settings import (
    Count,
    NonNegativeNumber,
    Number,
    OneOrMore,
    PositiveCount,
    PositiveNumber,
    Settings,
    cache_key,
    setting,
    shown,
)
from specheads.training.settings import Optimizer, Training

if TYPE_CHECKING:
    from specheads.pair.pair import Pair

T = TypeVar("T")
# SpecDec++ mixes because its heads read the drafted token. A look-ahead head does not, and the
# probability that a round survives is a product of probabilities that each assume that all earlier
# tokens are accepted: the context to learn from is the target's response. Measured on nano:
# docs/measurements/archive.md, kinds of heads.
Predicts = Literal["next_token", "input_token"]
# What the heads of each kind predict
KINDS: Mapping[str, Predicts] = {"lookahead": "next_token", "specdecpp": "input_token"}
# What people read in place of the kind with which a head's name begins
TITLES = {"lookahead": "look-ahead head", "specdecpp": "SpecDec++ head"}
RESPONSE_SHARE = {"input_token": 0.15, "next_token": 1.0}
REJECT_WEIGHT = {"input_token": 6.0, "next_token": 1.0}
# At 1, an input_token head would have nothing to predict
LARGEST_RESPONSE_SHARE = {"input_token": 0.99, "next_token": 1.0}


@dataclass(frozen=True)
class HeadSpec:
    """One head of a bank: its config and the weight of rejections in its loss."""

    name: str
    config: HeadConfig
    reject_weight: float = 1.0


def checked_share(predicts: str, response_share: float | None) -> float:
    """Return the probability that a position keeps the target's token, for None that of the kind.

    Raises UserError for others.
    """
    share = RESPONSE_SHARE[predicts] if response_share is None else response_share
    largest = LARGEST_RESPONSE_SHARE[predicts]
    if not 0 <= share <= largest:
        raise UserError(
            f"mixing.response_share={shown(share)} must be a number from 0 to {largest:g} for"
            f" {predicts} heads, for example 0.15."
        )
    return share


def _alike(value: tuple[str | tuple[str, ...], ...]) -> tuple[str | tuple[str, ...], ...]:
    if len({type(each) for each in value}) > 1:
        raise ValueError("mixes names and lists; give a list of names, or a list of such lists")
    return value


_LOOKAHEAD_ONLY = [
    name for name in KNOWN_INPUTS["next_token"] if name not in KNOWN_INPUTS["input_token"]
]


class _HeadShape(Settings):
    depth: OneOrMore[Count] = setting(
        3, "the number of residual blocks; 0: a linear head; or a list"
    )
    width: OneOrMore[PositiveCount | None] = setting(
        None,
        "the width of the blocks; null: the draft's hidden size, for lookahead an eighth of it, 8"
        " to 256; or a list",
    )
    inputs: Annotated[tuple[str | tuple[str, ...], ...], AfterValidator(_alike)] = setting(
        (),
        f"a list of {', '.join(KNOWN_INPUTS['input_token'])} and, for lookahead,"
        f" {', '.join(_LOOKAHEAD_ONLY)}; []: {', '.join(DEFAULT_INPUTS['input_token'])} for"
        f" specdecpp, {', '.join(DEFAULT_INPUTS['next_token'])} for lookahead, and depth for drafts"
        " that read their target, which alone have it; or a list of such lists",
    )


class _Mixing(Settings):
    response_share: Number | None = setting(
        None,
        "the probability that a position keeps the target's token in place of the drafted one;"
        " null: 0.15 (as in SpecDec++) for specdecpp, 1 (no mixing) for lookahead",
    )
    num_mixes: PositiveCount = setting(
        4,
        "the number of ways in which drafted tokens are mixed into each text, which epochs take in"
        " turn; as many as trainer.max_epochs, or more: another one in every epoch",
    )


class HeadTraining(Training):
    """How acceptance heads are trained."""

    heads: Literal["both", "lookahead", "specdecpp"] = setting(
        "both",
        "the kind of heads: lookahead predicts whether a token is accepted before the draft has"
        " read it, specdecpp (as in SpecDec++) after that; both, one after the other",
        decides=False,
    )
    head: _HeadShape = setting(
        _HeadShape(),
        "the inputs and size of the head to train; a trained one is given to specheads evaluate",
        decides=False,
    )
    reject_weight: OneOrMore[PositiveNumber | None] = setting(
        None,
        "the weight of a token's rejection in the loss, where that of its acceptance is 1; null: 6"
        " (as in SpecDec++) for specdecpp, 1 for lookahead; or a list",
        key="loss.reject_weight",
        decides=False,
    )
    mixing: _Mixing = setting(
        _Mixing(), "how drafted tokens are mixed into the text", decides=False
    )
    optimizer: Optimizer = setting(Optimizer(), "AdamW's settings")
    features_budget: NonNegativeNumber = setting(
        8,
        "the largest size, in GiB, of the draft's states that are kept on disk, so that it reads"
        " each mix of a text once; larger ones are computed in every epoch",
        decides=False,
    )
    calibration: PositiveCount | None = setting(
        100,
        "the number of dev prompts that trained heads are calibrated on, by index in the round;"
        " null: they are not calibrated",
        decides=False,
    )

    @model_validator(mode="after")
    def check_heads(self) -> "HeadTraining":
        _ = [part.response_share for part in self.kinds()]
        self.specs()
        return self

    def kinds(self) -> "list[HeadTraining]":
        """Return the settings of each kind of heads: these, if there is one."""
        return [self] if self.heads in KINDS else [self.but(heads=kind) for kind in KINDS]

    @property
    def predicts(self) -> Predicts:
        return KINDS[self.heads]

    def specs(self, pair: "Pair | None" = None) -> list[HeadSpec]:
        """Return the heads to train for a pair, one for each combination of values.

        Without a pair sizes are 1, to check settings before models are loaded. A head's name has
        those of its settings that have several values.
        """
        if self.heads not in KINDS:
            specs_of_kinds = list[HeadSpec]()
            for part in self.kinds():
                specs_of_kinds += part.specs(pair)
            return specs_of_kinds
        inputs = self.head.inputs
        default = DEFAULT_INPUTS[self.predicts]
        reads_target = pair is not None and bool(pair.draft_lm.reads_layers)
        if reads_target:
            default += READING_INPUTS
        several_inputs = bool(inputs) and not isinstance(inputs[0], str)
        choices: dict[str, tuple] = {
            "head.depth": _choices(self.head.depth),
            "head.width": _choices(self.head.width),
            "head.inputs": inputs if several_inputs else (inputs,),
            "loss.reject_weight": _choices(self.reject_weight),
        }
        for key, values in choices.items():
            if not values:
                raise UserError(f"{key}=[] names no value; give one, or several.")
        specs: dict[str, HeadSpec] = {}
        for depth, width, names, given_weight in itertools.product(*choices.values()):
            config = HeadConfig(
                depth=depth,
                width=width,
                inputs=names or default,
                predicts=self.predicts,
                warp=self.warp.values(),
                **_properties(pair),
            )
            if pair is not None and not reads_target and "depth" in config.inputs:
                raise UserError(
                    f"head.inputs names 'depth', but the draft {pair.draft_id} does not read its"
                    " target, so its states have none; leave it out."
                )
            weight = given_weight or REJECT_WEIGHT[self.predicts]
            name = f"{self.heads}-d{depth}-r{weight:g}"
            if len(choices["head.width"]) > 1:
                name += f"-w{config.width}"
            if several_inputs and len(inputs) > 1:
                name += f"-{'+'.join(config.inputs)}"
            name = name.replace(".", "_")
            if name in specs:
                raise UserError(
                    "the same head is asked for twice; give each value of each setting once."
                )
            specs[name] = HeadSpec(name, config, weight)
        return list(specs.values())

    @property
    def response_share(self) -> float:
        return checked_share(self.predicts, self.mixing.response_share)

    @property
    def num_mixes(self) -> int:
        """The number of different texts that the draft reads for each response."""
        if self.response_share == 1:
            return 1
        return min(self.mixing.num_mixes, self.trainer.max_epochs)

    def cache_key(self) -> dict[str, object]:
        """Return the settings that decide the result of a training, except for the data and the
        heads.
        """
        parts = self.kinds()
        shares = [part.response_share for part in parts]
        mixes = [part.num_mixes for part in parts]
        is_one = len(parts) == 1
        mixing = {
            "mixing.response_share": shares[0] if is_one else shares,
            "mixing.num_mixes": mixes[0] if is_one else mixes,
        }
        return cache_key(self) | self.trainer.cache_key() | mixing


def title_of(name: str) -> str:
    """Return what kind of head has such a name; of a name from elsewhere the name."""
    return TITLES.get(name.partition("-")[0], name)


def _choices(value: T | tuple[T, ...]) -> tuple[T, ...]:
    return value if isinstance(value, tuple) else (value,)


def _properties(pair: "Pair | None") -> dict[str, Any]:
    """Return what a head's config says about its pair."""
    if pair is None:
        return {"hidden_size": 1, "embedding_size": 1}
    return {
        "hidden_size": pair.draft_lm.hidden_size,
        "embedding_size": pair.draft.get_input_embeddings().weight.shape[1],
        "vocab_size": pair.vocab_size,
        "draft": pair.origin("draft"),
        "target": pair.origin("target"),
    }
