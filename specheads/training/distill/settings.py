"""The settings of a distillation: every key of `specheads distill`, with its constraint and its
sentence of help.
"""

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from specheads.errors import UserError
from specheads.settings import (
    Count,
    Flag,
    NonNegativeNumber,
    PositiveCount,
    PositiveNumber,
    Probability,
    Settings,
    cache_key,
    setting,
    shown,
)
from specheads.training.settings import Loader, TrainerSettings, Training

if TYPE_CHECKING:
    from specheads.pair.initial_draft import NewDraft

# The learning rate that was best for nano's draft, times its width; updates of wider layers add up
LR_TIMES_WIDTH = 0.16
# The same for mini's EAGLE-3 draft, by AdamW; at a width of 4096 it is that of the paper
LR_TIMES_WIDTH_OF_EAGLE3 = 0.5


class _DraftOptimizer(Settings):
    """Muon and AdamW, with a default learning rate that depends on the draft's width."""

    lr: PositiveNumber | None = setting(
        None,
        "the highest learning rate; it falls to 0 as a cosine; null: 0.16 / the draft's hidden"
        " size, of an EAGLE-3 draft 0.5 / its size",
    )
    weight_decay: NonNegativeNumber = setting(0.0, "the weight decay; 0: none")
    warmup_share: Probability = setting(
        0.03, "the share of all steps in which the learning rate rises; 0: none"
    )


class _DraftTrainer(TrainerSettings):
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "auto"] = setting(
        "auto",
        "the precision of arithmetic; auto: bf16-mixed on CUDA and for a draft in bfloat16, else"
        " 32-true; weights are always trained in float32",
    )


class Distillation(Training):
    """The settings of a distillation. Raises UserError for the first mistake."""

    # Responses that the draft itself writes taught less (docs/measurements/archive.md, distilled
    # drafts).
    samples: Literal["text", "target"] = setting(
        "target",
        "whose responses to the train prompts the draft learns from: text (the data set's own) or"
        " target (the target's)",
    )
    draft_kind: Literal["stand_alone", "eagle3", "eagle3.1"] = setting(
        "stand_alone",
        "the kind of draft: stand_alone (reads tokens alone), or a new layer that also reads the"
        " target's hidden states: eagle3, or eagle3.1 (with more norms)",
    )
    num_steps: PositiveCount = setting(
        3,
        "how many steps an EAGLE-3 draft makes from each position in training, the first with the"
        " target's states, the others with its own",
        key="eagle3.steps",
    )
    step_decay: PositiveNumber = setting(
        1.0,
        "the weight of a step's loss next to that of the step before: 1 as speculators, 0.8 as"
        " EAGLE",
        key="eagle3.step_decay",
    )
    target_layers: tuple[Count, ...] | None = setting(
        None,
        "the target's layers whose inputs an EAGLE-3 draft reads, [2,18,33]; null: those of the"
        " paper's implementation, and of a small target others",
        key="eagle3.target_layers",
    )
    form: Literal["speculators", "safeailab"] = setting(
        "speculators",
        "the format of an EAGLE-3 draft's folder: speculators, or safeailab, which SpecForge has,"
        " too, for draft_kind=eagle3 alone",
        key="eagle3.format",
    )
    init_layers: PositiveCount | tuple[Count, ...] | None = setting(
        None,
        "the target's layers that the draft begins with, [0,3,5], or how many, spread evenly; null:"
        " the pair's draft",
    )
    draft_vocabulary: PositiveCount | None = setting(
        None,
        "how many tokens the draft's output keeps: those that end a response, and the most frequent"
        " ones; null: all",
    )
    embedding: Literal["own", "target"] = setting(
        "own",
        "the draft's input embeddings; target: those of the target, which are not trained and not"
        " stored, as EAGLE-3's always are; needs draft_vocabulary",
    )
    stored_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = setting(
        "auto",
        "the type of the weights in the new draft's folder; auto: bfloat16 for a draft in float32,"
        " else its own; int8: linear maps in 8 bits, which only specheads reads",
        decides=False,
    )
    divergence: Literal["auto", "total_variation", "forward_kl"] = setting(
        "auto",
        "the divergence from the target's distribution: total_variation (the probability of a"
        " rejection) or forward_kl; auto: forward_kl for an EAGLE-3 draft, else total_variation",
        key="loss.divergence",
    )
    target_probs_budget: NonNegativeNumber = setting(
        16,
        "the largest size, in GiB, of what is stored of the target along train texts: its"
        " distributions (the 64 most likely tokens of each, and the rest), or the states that an"
        " EAGLE-3 draft reads; what is larger is computed in every epoch",
        decides=False,  # which responses are read from the store decides, see load_splits
    )
    gradient_checkpointing: Flag = setting(
        False,
        "whether the draft's layers run again for the gradient, which takes less memory and a third"
        " more time",
        decides=False,
    )
    optimizer: _DraftOptimizer = setting(_DraftOptimizer(), "how weights are updated")
    loader: Loader = setting(Loader(batch_size=16), "how texts are loaded")
    num_dev_prompts: PositiveCount = setting(
        100,
        "dev prompts on whose responses the draft is measured after each epoch",
        key="validation.num_prompts",
        decides=False,
    )
    trainer: _DraftTrainer = setting(
        _DraftTrainer(), "arguments of lightning.Trainer", decides=False
    )

    @property
    def initial_draft(self) -> "NewDraft | None":
        """What makes the draft before training; None: it is the pair's."""
        # Imports transformers, which takes seconds
        from specheads.pair.initial_draft import NewFeatureDraft, TargetLayers

        if self.draft_kind != "stand_alone":
            return NewFeatureDraft(self.draft_kind, self.target_layers, self.seed, self.form)
        return None if self.init_layers is None else TargetLayers(self.init_layers)

    @property
    def makes_draft(self) -> bool:
        """Whether the pair's own draft is not read."""
        return self.draft_kind != "stand_alone" or self.init_layers is not None

    @model_validator(mode="after")
    def check_values(self) -> "Distillation":
        if self.draft_kind != "stand_alone":
            self._check_of_eagle3()
        elif self.embedding == "target" and self.draft_vocabulary is None:
            raise UserError(
                "embedding=target stores no input embeddings, and a draft whose output has all"
                " tokens may share them; give for example draft_vocabulary=16384."
            )
        return self

    def _check_of_eagle3(self) -> None:
        if self.init_layers is not None:
            raise UserError(
                f"init_layers={shown(self.init_layers)} makes a stand-alone draft of the target's"
                f" layers, and draft_kind={self.draft_kind} one of a new layer; leave out one of"
                " them."
            )
        if self.stored_dtype == "int8":
            raise UserError(
                f"stored_dtype=int8 is of stand-alone drafts, and draft_kind={self.draft_kind} is"
                " stored as other programs read it; use bfloat16, float16 or float32."
            )
        if self.form == "safeailab" and self.draft_kind != "eagle3":
            raise UserError(
                f"eagle3.format=safeailab has no norms of draft_kind={self.draft_kind}; use"
                " draft_kind=eagle3, or eagle3.format=speculators."
            )

    def for_draft(self, width: int, reads_target: bool = False) -> "Distillation":
        """Return settings with the learning rate and the divergence of a draft whose hidden states
        have `width` numbers, where they leave these open.
        """
        lr = (LR_TIMES_WIDTH_OF_EAGLE3 if reads_target else LR_TIMES_WIDTH) / width
        divergence = "forward_kl" if reads_target else "total_variation"
        return self.but(
            optimizer=self.optimizer.but(lr=self.optimizer.lr or lr),
            divergence=divergence if self.divergence == "auto" else self.divergence,
        )

    def cache_key(self) -> dict[str, object]:
        """Return the settings that decide the result of a training, except for models and data."""
        return cache_key(self) | self.trainer.cache_key()
