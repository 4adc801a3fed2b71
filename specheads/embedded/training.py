"""The training of one model: Muon moves the matrices, AdamW the embedding and the norms.

On 2 cores this reaches a given loss in about half the steps of AdamW alone. A checkpoint holds everything that decides the
weights, so that a run that was killed ends with the same ones.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from specheads.embedded.corpus import Function
from specheads.embedded.recipe import MAX_POSITIONS, Recipe
from specheads.muon import Muon, multiplied_dtype
from specheads.storage.files import write_whole

logger = logging.getLogger(__name__)

CHECKPOINT_STEPS = 50
CHECKPOINT_SECONDS = 600  # whichever comes first: steps take long where other work has the cores
LOG_STEPS = 25
DEV_STEPS = 200  # between two dev losses
TOKENS_WORTH_COMPILING = 1_000_000  # compiling takes a minute or two and saves a fifth to a quarter of a step
DEV_FUNCTIONS = 64  # of each dev loss: about as many tokens as two steps


@dataclass
class Progress:
    """The progress of a training: steps done, their seconds, and dev losses in nats per response token by step."""

    step: int = 0
    seconds: float = 0.0
    dev_losses: dict[int, float] = field(default_factory=dict)


class Training:
    """A model, its optimizers and its progress."""

    def __init__(self, model: LlamaForCausalLM, stream: torch.Tensor, recipe: Recipe) -> None:
        self.model, self.stream, self.recipe, self.progress = model, stream, recipe, Progress()
        # Compiled beside the model, which is called with texts of every length for its dev loss.
        self._forward = torch.compile(model, dynamic=False) if recipe.tokens >= TOKENS_WORTH_COMPILING else model
        self.optimizer = Muon(model, recipe.muon_lr, recipe.adamw_lr, matrix_decay=0.01)
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._saved = {"model": model, "optimizer": self.optimizer}
        text = hashlib.sha256(stream.numpy().tobytes()).hexdigest()
        self._key = f"{asdict(recipe)} {model.config.to_json_string()} {text}"

    def step(self) -> float:
        """Train on the next batch; return its mean loss in nats per token."""
        number = self.progress.step
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * self.recipe.rate(number)
        batch = self.recipe.batch(self.stream, number)
        dtype = multiplied_dtype(batch.device)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = self._forward(batch[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1
        return loss.item()

    def save(self, checkpoint: Path) -> None:
        """Write everything that the next steps depend on."""
        state = {name: part.state_dict() for name, part in self._saved.items()}
        state |= {"key": self._key, "progress": asdict(self.progress)}
        write_whole(checkpoint, lambda temporary: torch.save(state, temporary))

    def load(self, checkpoint: Path) -> bool:
        """Continue from a checkpoint; return False, changing nothing, for one of another recipe, shape or text."""
        state = torch.load(checkpoint, weights_only=True)
        if state["key"] != self._key:
            return False
        for name, part in self._saved.items():
            part.load_state_dict(state[name])
        self.progress = Progress(**state["progress"])
        return True


def fit(
    model: LlamaForCausalLM,
    stream: torch.Tensor,
    recipe: Recipe,
    checkpoint: Path | None = None,
    dev_loss: Callable[[LlamaForCausalLM], float] | None = None,
) -> Progress:
    """Train `model` in place on random windows of `stream` (N,) int16; return how it went.

    With `checkpoint`, the state is written there every fifty steps or ten minutes, and a run with the same recipe, shape and
    stream resumes from it and ends with the same weights. `dev_loss` is called every 200 steps; the weights do not depend on it.
    """
    training = Training(model, stream, recipe)
    if checkpoint is not None and checkpoint.exists() and training.load(checkpoint):
        logger.info("continues from step %d of %s", training.progress.step, checkpoint)
    progress = training.progress
    start, saved = time.perf_counter() - progress.seconds, progress.seconds
    model.train()
    while progress.step < recipe.steps:
        loss = training.step()
        progress.seconds = time.perf_counter() - start
        last = progress.step == recipe.steps
        if last or progress.step % LOG_STEPS == 1:
            _log(loss, progress, recipe)
        if dev_loss is not None and (last or progress.step % DEV_STEPS == 0):
            model.eval()
            progress.dev_losses[progress.step] = dev_loss(model)
            model.train()
            logger.info("step %d  dev loss %.4f", progress.step, progress.dev_losses[progress.step])
        due = progress.step % CHECKPOINT_STEPS == 0 or progress.seconds - saved >= CHECKPOINT_SECONDS
        if checkpoint is not None and (last or due):
            training.save(checkpoint)
            saved = progress.seconds
    model.eval()
    return progress


def _log(loss: float, progress: Progress, recipe: Recipe) -> None:
    per_step = progress.seconds / progress.step
    rate, remaining = recipe.tokens_per_step / per_step, per_step * (recipe.steps - progress.step)
    logger.info("step %d  loss %.4f  %.0f tokens/s  %.0f s left", progress.step, loss, rate, remaining)


def dev_subset(functions: Sequence[Function]) -> list[Function]:
    """Return the functions for the dev loss during training, spread evenly over the files."""
    return list(functions[:: max(1, len(functions) // DEV_FUNCTIONS)][:DEV_FUNCTIONS])


@torch.no_grad()
def response_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, functions: Sequence[Function]) -> float:
    """Return the mean loss in nats per response token (end token included) over at most 400 functions."""
    total, count = 0.0, 0
    for function in functions[:400]:
        prompt = tokenizer(function.prompt)["input_ids"]
        body = tokenizer(function.body, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([*prompt, *body, tokenizer.eos_token_id])[None, :MAX_POSITIONS]
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        total += cross_entropy(logits, ids[0, len(prompt) :], reduction="sum").item()
        count += ids.shape[1] - len(prompt)
    return round(total / count, 4)
