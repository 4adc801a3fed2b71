"""What decides an embedded pair: the shapes of its models, how long they train, and where tokenizer and text come from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.embedded.growth import grow

VOCAB_SIZE = 2048
MAX_POSITIONS = 2048


@dataclass(frozen=True)
class Recipe:
    """How one model trains. With the text and the shape, it decides the weights."""

    steps: int
    tokens_per_step: int = 8192
    length: int = 512  # tokens per sequence
    long_length: int = MAX_POSITIONS  # of the last steps, so that every position is trained
    long_share: float = 0.08
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    warmup: int = 50
    cooldown: float = 0.5  # share of the steps over which the rate falls to zero
    seed: int = 0
    then: "Recipe | None" = None  # what follows, with optimizers of its own

    @property
    def stages(self) -> "list[Recipe]":
        """This recipe and all that follow it."""
        return [self, *([] if self.then is None else replace(self.then, seed=self.seed).stages)]

    @property
    def tokens(self) -> int:
        """Tokens of the steps of this stage."""
        return self.steps * self.tokens_per_step

    def shape(self, step: int) -> tuple[int, int]:
        """Sequences and tokens per sequence of one step."""
        length = self.long_length if step >= self.steps * (1 - self.long_share) else self.length
        return self.tokens_per_step // length, length

    def rate(self, step: int) -> float:
        """The learning rate as a share of its peak: a linear warm-up, a plateau, a linear fall to zero."""
        fall = max(1, math.ceil(self.steps * self.cooldown))
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / fall)

    def batch(self, stream: torch.Tensor, step: int) -> torch.Tensor:
        """Windows (sequences, length + 1) at random places of the stream; a step's windows depend on the seed and the step."""
        sequences, length = self.shape(step)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(stream) - length - 1, (sequences,), generator=generator)
        return torch.stack([stream[s : s + length + 1] for s in starts.tolist()]).long()


@dataclass(frozen=True)
class PairRecipe:
    """One embedded pair. `target` and `draft` are the roles that name shapes and recipes."""

    name: str  # its package: `specheads.<name>`
    shapes: Mapping[str, Mapping[str, int]]  # arguments of LlamaConfig
    recipes: Mapping[str, Recipe]
    dtype: torch.dtype  # of the weights on disk
    start: Path | None = None  # folder of the pair whose models these grow from; None: they begin with random weights
    tokenizer: Path | None = None  # folder of another pair's tokenizer; None: train one on the training text
    manifest: Path | None = None  # the training text it is pinned to; None: whatever is installed
    figures_script: str | None = None  # computes the table of figures on its card; None: the card has no such table

    def new_model(self, role: str, seed: int) -> LlamaForCausalLM:
        """Return the model of a role before its first step."""
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            **self.shapes[role],
        )
        model = LlamaForCausalLM(config)
        if self.start is not None:
            grow(model, LlamaForCausalLM.from_pretrained(self.start / role, dtype=torch.float32))
        return model
