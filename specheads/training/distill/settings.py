"""The settings of a distillation: every key of `specheads distill`, with its constraint and its sentence of help."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from specheads.errors import UserError
from specheads.pair.sampling import Warp
from specheads.settings import (
    Built,
    Count,
    Flag,
    NonNegativeNumber,
    OpenProbability,
    PositiveCount,
    PositiveNumber,
    Seed,
    Settings,
    Share,
    Text,
    setting,
    shown,
)
from specheads.training.settings import Checkpointing, DraftOptimizer, Loader, TrainerSettings

if TYPE_CHECKING:
    from specheads.training.distill.initial_draft import InitialDraft

KINDS = ("text", "target", "on_policy")  # of responses: the data set's, the target's, the draft's


class Mixture(Settings):
    """The share of each kind of response in mixed samples."""

    text: NonNegativeNumber = setting(0.0, "the share of the data set's own responses")
    target: NonNegativeNumber = setting(0.5, "the share of the target's responses")
    on_policy: NonNegativeNumber = setting(0.5, "the share of the draft's own responses")


class DistillLoss(Settings):
    """What a draft learns from the target's distributions, and from the tokens of the texts."""

    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation"] = setting(
        "total_variation",
        "the divergence of the draft's distribution from the target's, for each token: forward_kl, reverse_kl, jensen_shannon or "
        "total_variation",
    )
    beta: OpenProbability = setting(0.5, "the target's weight in jensen_shannon")
    temperature: PositiveNumber = setting(1.0, "the number that the logits of both models are divided by")
    hard_weight: NonNegativeNumber = setting(
        0.0, "the weight of the cross-entropy of the text's tokens, added to the divergence; 0: none"
    )
    token_share: Share = setting(
        1.0,
        "the share of each batch's tokens to learn from, those where the draft's loss exceeds the reference's most "
        "(AdaSPEC: Hu et al. 2025); 1: all",
    )


class TargetStorage(Settings):
    """Whether the target's distributions along responses that stay the same are stored."""

    keep: Literal["auto", "cached", "recomputed"] = setting(
        "auto",
        "where the target's distributions come from; cached: the most likely tokens and the rest are stored on disk; recomputed: "
        "a target forward pass per text and epoch; auto: cached if they fit the budget and are read again, or if the GPU has no "
        "memory for the target while the draft trains",
    )
    top_k: PositiveCount = setting(64, "the number of tokens of each distribution that are stored, at 6 bytes each")
    budget: NonNegativeNumber = setting(16, "the largest size of the store, in GiB")


class Validation(Settings):
    """What the draft is measured on after each epoch."""

    num_prompts: PositiveCount = setting(100, "dev prompts whose responses the draft is measured on, after each epoch")
    live_prompts: Count = setting(4, "dev prompts to decode as well, 64 tokens of each with drafts of four; 0: none")


class DraftLoader(Loader):
    """How texts are loaded."""

    batch_size: PositiveCount = setting(16, "texts per batch, of all processes together: each takes an equal part")


class DraftTrainer(TrainerSettings):
    """Arguments of lightning.Trainer for a whole draft."""

    precision: Literal["32-true", "bf16-mixed", "16-mixed", "auto"] = setting(
        "auto",
        "the precision of arithmetic; auto: bf16-mixed on CUDA and for a draft in bfloat16, else 32-true; with half precision "
        "the other products on CUDA are in TF32; weights are always trained in float32, as half-precision weights lose small "
        "steps",
    )


class Distillation(Settings):
    """The settings of a distillation. Raises UserError for the first mistake."""

    samples: Literal["text", "target", "on_policy", "mixed"] = setting(
        "target",
        "whose responses to the train prompts the draft learns from: text (the data set's own), target (the target's), on_policy "
        "(those that the draft writes during training) or mixed",
    )
    mixed: Mixture = setting(Mixture(), "the share of each kind of response, for samples=mixed")
    refresh_every: PositiveCount = setting(
        16, "optimizer steps for which the draft writes its responses in advance, with the weights of the first of these steps"
    )
    init: Literal["draft", "layers", "fresh"] = setting(
        "draft", "where training starts: draft (the pair's), layers (some of the target's) or fresh (random weights)"
    )
    init_layers: PositiveCount | tuple[Count, ...] | None = setting(
        None, "the target's layers to take for init=layers, [0,3,5], or how many, spread evenly; null: a quarter of them"
    )
    init_config: dict[str, Any] | None = setting(
        None, "what differs from the target's config.json for init=fresh, '{num_hidden_layers: 2}'"
    )
    loss: DistillLoss = setting(DistillLoss(), "what is learned for each token")
    reference: Text | None = setting(
        None, "a draft that was distilled before, a folder or hub id, for loss.token_share below 1", decides=False
    )  # its revision decides
    target_probs: TargetStorage = setting(
        TargetStorage(), "how the target's distributions along text and target responses are kept", decides=False
    )  # which responses are read from the store decides, see sample_splits.py
    gradient_checkpointing: Flag | Literal["auto"] = setting(
        "auto",
        "whether the draft's layers run again for the gradient, which takes less memory and a third more time; auto: if they do "
        "not fit a GPU otherwise",
        decides=False,
    )
    optimizer: DraftOptimizer = setting(DraftOptimizer(), "how weights are updated")
    loader: DraftLoader = setting(DraftLoader(), "how texts are loaded")
    validation: Validation = setting(Validation(), "what the draft is measured on", decides=False)
    trainer: DraftTrainer = setting(
        DraftTrainer(), "arguments of lightning.Trainer", decides=False
    )  # see TrainerSettings.cache_key
    checkpoint: Checkpointing = setting(Checkpointing(), "when checkpoints are written")
    warp: Built[Warp] = setting(
        Warp(1.0, top_k=50), "how draft and target turn logits into probabilities, in training and decoding", decides=False
    )  # part of the data set's provenance
    seed: Seed = setting(0, "seed of everything that is random")
    resume: Flag | Text = setting(
        True,
        "true: resume the newest run of the same command if it is unfinished; false: start again; or a checkpoint to resume in a "
        "new folder",
        decides=False,
    )

    @property
    def shares(self) -> dict[str, float]:
        """The probability of each kind of response that occurs."""
        shares: dict[str, float] = self.mixed.values() if self.samples == "mixed" else {self.samples: 1.0}
        total = sum(shares.values())
        return {kind: shares[kind] / total for kind in KINDS if shares.get(kind, 0) > 0}

    @property
    def initial_draft(self) -> "InitialDraft | None":
        """What makes the draft before training; None: it is the pair's."""
        from specheads.training.distill.initial_draft import (
            RandomDraft,
            TargetLayers,
        )  # imports transformers, which takes seconds

        if self.init == "layers":
            return TargetLayers(self.init_layers)
        return RandomDraft(self.init_config or {}, self.seed) if self.init == "fresh" else None

    @model_validator(mode="after")
    def check_samples(self) -> "Distillation":
        """Refuse mixed samples whose shares are all zero."""
        if self.samples == "mixed" and not sum(self.mixed.values().values()) > 0:
            raise UserError("samples=mixed: all shares are 0; give for example mixed.target=0.5 mixed.on_policy=0.5.")
        return self

    @model_validator(mode="after")
    def check_initial_draft(self) -> "Distillation":
        """Refuse settings of an initial draft that `init` does not read, and fresh drafts that are as large as the target."""
        if self.init == "fresh" and not self.init_config:
            raise UserError(
                "init=fresh needs init_config: what makes it smaller than the target, for example "
                "'init_config={num_hidden_layers: 2, hidden_size: 512}'."
            )
        for init, key, value in (("layers", "init_layers", self.init_layers), ("fresh", "init_config", self.init_config or None)):
            if value is not None and self.init != init:
                raise UserError(
                    f"{key}={shown(value)} is for init={init}, but init={self.init}; leave it out, or give init={init}."
                )
        return self

    @model_validator(mode="after")
    def check_reference(self) -> "Distillation":
        """Refuse a share of the tokens without a reference that chooses them, and a reference that chooses nothing."""
        if (self.loss.token_share < 1) != (self.reference is not None):
            raise UserError(
                f"loss.token_share={self.loss.token_share} and reference={shown(self.reference)} go together: the tokens to "
                "learn from are those where the draft's loss exceeds that of a reference, a draft that was distilled before. "
                "Give both, for example loss.token_share=0.4 reference=outputs/distill/<date_time>/draft, or neither."
            )
        return self
