"""The settings of head training."""

from typing import Annotated, Any, Literal

from specheads.errors import UserError
from specheads.pair import Pair
from specheads.sampling import Warp
from specheads.settings import (
    Built,
    Flag,
    NonNegativeNumber,
    Number,
    PositiveCount,
    Seed,
    Settings,
    Share,
    Text,
    cache_key,
    count,
    model_validator,
    setting,
    shown,
)
from specheads.training.heads.bank import HeadSpec
from specheads.training.heads.head_shape import HeadLoss, HeadShape
from specheads.training.heads.head_specs import head_specs
from specheads.training.optimizer import Optimizer
from specheads.training.trainer_settings import Checkpointing, Loader, TrainerSettings

# The paper mixes because its heads read the drafted token. A look-ahead head does not, and the probability that a round survives
# is a product of probabilities that each assume that all earlier tokens are accepted: the context to learn from is the target's
# response. Measured on nano: docs/measurements/archive.md, kinds of heads.
RESPONSE_SHARE = {"input_token": 0.15, "next_token": 1.0}
LARGEST_RESPONSE_SHARE = {"input_token": 0.99, "next_token": 1.0}  # at 1, an input_token head would have nothing to predict


def checked_share(predicts: str, response_share: float | None) -> float:
    """Return the probability that a position keeps the target's token, for None the default of the kind of head.

    Raises:
        UserError: it is outside [0, 1], or leaves an `input_token` head nothing to predict.
    """
    share, largest = RESPONSE_SHARE[predicts] if response_share is None else response_share, LARGEST_RESPONSE_SHARE[predicts]
    if not 0 <= share <= largest:
        raise UserError(
            f"mixing.response_share={shown(share)} must be a number from 0 to {largest:g} for head.predicts={predicts}, for "
            "example 0.15."
        )
    return share


class Mixing(Settings):
    """How drafted tokens are mixed into the text that the draft reads (SpecDec++, section 3.2)."""

    response_share: Number | None = setting(
        None,
        "the probability that a position keeps the target's token in place of the drafted one; null: 0.15 (the paper's) for "
        "input_token, 1 (no mixing) for next_token",
    )
    redrawn: Flag = setting(
        True, "true: every epoch mixes other positions; false: all mix the same ones, as in the code of SpecDec++'s authors"
    )


class Calibration(Settings):
    """How heads are calibrated by index in the round, on recorded dev prompts."""

    num_prompts: PositiveCount = setting(
        100, "the number of dev prompts to record; specheads evaluate reuses the recording if its num_dev_prompts is the same"
    )
    num_samples: PositiveCount = setting(
        4,
        "the number of acceptance samples of each response; evaluations with the same record.num_samples reuse the recording",
    )
    batch_size: Annotated[int, count(1, 2**16)] = setting(
        64, "the number of branches of the longest text that the draft reads together; fewer take less memory"
    )


class HeadTraining(Settings):
    """How acceptance heads are trained."""

    seed: Seed = setting(0, "the seed of everything that is random")
    warp: Built[Warp] = setting(
        Warp(1.0, top_k=50), "how draft and target turn logits into probabilities, in training and decoding", decides=False
    )
    head: HeadShape = setting(
        HeadShape(),
        "the kind, inputs and size of the head to train; a trained one is given to specheads evaluate",
        decides=False,
    )
    loss: HeadLoss = setting(HeadLoss(), "the weights of the loss", decides=False)
    mixing: Mixing = setting(Mixing(), "how drafted tokens are mixed into the text", decides=False)
    train_share: Share = setting(1.0, "the share of the train prompts to learn from, the first ones")
    optimizer: Optimizer = setting(Optimizer(), "AdamW's settings")
    features: Literal["auto", "cached", "online"] = setting(
        "auto",
        "cached: the draft reads each text once, and its states are kept on disk; online: it reads them in every epoch; auto: "
        "cached, if texts stay the same (no mixing) and the budget allows",
        decides=False,
    )
    features_budget: NonNegativeNumber = setting(8, "the largest size of the stored states, in GiB", decides=False)
    loader: Loader = setting(Loader(), "how batches are loaded")
    trainer: TrainerSettings = setting(
        TrainerSettings(), "the arguments of lightning.Trainer", decides=False
    )  # see TrainerSettings.cache_key
    checkpoint: Checkpointing = setting(Checkpointing(), "when checkpoints are written", decides=False)
    calibration: Calibration | None = setting(
        Calibration(), "how heads are calibrated once they are trained; null: not at all", decides=False
    )
    resume: Flag | Text = setting(
        True,
        "true: resume the newest run of the same command if it is unfinished; false: start again; or a checkpoint to resume in a "
        "new folder",
        decides=False,
    )

    @model_validator(mode="after")
    def check_heads(self) -> "HeadTraining":
        """Refuse heads that cannot be built, or that have nothing to learn."""
        if self.response_share < 1 and any("target_hidden" in spec.config.inputs for spec in self.specs()):
            raise UserError(
                f"mixing.response_share={self.response_share} mixes drafted tokens into the text, but target_hidden in "
                "head.inputs is the state of a target that has read only its response; leave mixing.response_share=null or 1."
            )
        return self

    def specs(self, pair: Pair | None = None) -> list[HeadSpec]:
        """Return the heads to train for a pair; see `head_specs`."""
        return head_specs(self.head, self.loss, self.warp, pair)

    @property
    def response_share(self) -> float:
        """The probability that a position keeps the target's token."""
        return checked_share(self.head.predicts, self.mixing.response_share)

    @property
    def reads_target(self) -> bool:
        """Whether any head reads the target's states."""
        return any("target_hidden" in names for names in self.head.inputs) or "target_hidden" in self.head.inputs

    @property
    def labels(self) -> list[str]:
        """All labels that heads learn."""
        return [self.head.label] if isinstance(self.head.label, str) else list(self.head.label)

    def cache_key(self) -> dict[str, Any]:
        """Return the settings that decide the result of a training, except for the data and the heads."""
        return cache_key(self) | self.trainer.cache_key() | {"mixing.response_share": self.response_share}
