"""Distilling a draft: the run, from settings and data to the folder of the new draft."""

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import Trainer
from lightning.pytorch.loggers import Logger
from transformers import PreTrainedModel

from specheads.errors import UserError
from specheads.heads.card import inert
from specheads.interrupts import deferred
from specheads.pair.draft_vocabulary import (
    FORM,
    borrow_embedding,
    borrows_embedding,
    check_embedding,
    keep_tokens,
    stored_as,
)
from specheads.pair.eagle_formats import check_safeailab, write_safeailab, write_speculators
from specheads.pair.feature_draft import FeatureDraft
from specheads.pair.needs import memory_of, memory_parts
from specheads.pair.padding import SLICE_ELEMENTS
from specheads.pair.pair import Pair, load_draft
from specheads.pair.quantization import is_quantized
from specheads.pair.revisions import draft_temperature, without_bars
from specheads.progress import stage
from specheads.prompts.prompt import GeneratedData
from specheads.settings import shown
from specheads.storage.files import space_of, write_json
from specheads.training.distill.distill_loss import HELD_SLICES
from specheads.training.distill.distill_module import DRAFT, DistillModule, shards_weights
from specheads.training.distill.draft_quality import draft_quality, with_fitted_temperature
from specheads.training.distill.memory import TrainedWeights, check_trainable
from specheads.training.distill.samples import Samples, load_splits, train_samples
from specheads.training.distill.settings import Distillation
from specheads.training.loaders import ResumableData
from specheads.training.trainer import (
    Checkpoints,
    checkpoint_to_resume,
    fast_products,
    new_trainer,
)

logger = logging.getLogger(__name__)

WHOSE = {"text": "the data set's", "target": "the target's"}
# What dropout is called in transformers' modules.
DROPOUT = ("p", "dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "layerdrop")


class DevOverlap(NamedTuple):
    """A draft's overlap with its target on dev prompts: after the epoch whose weights are exported,
    counted from 0, after the last, and before training.
    """

    epoch: int
    best: float
    last: float
    before: float


@dataclass(frozen=True)
class DistilledDraft:
    """The folder of a distilled draft, its quality on test prompts before and after, and its
    overlap on dev prompts, which only the first process has.
    """

    folder: Path
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    dev: DevOverlap | None = None


def distill(
    pair: Pair,
    data: GeneratedData | Callable[[], GeneratedData],
    settings: Distillation,
    run: Path,
    loggers: Sequence[Logger] = (),
) -> DistilledDraft:
    """Train the pair's draft, in place and in float32, to propose what its target would say, and
    write it to `run`/draft.

    Load the pair with `new_draft=settings.initial_draft`. A function that makes the data is called
    after all else was checked. `loggers` get the curves. Raises UserError for settings that do not
    fit the pair, the data or the machine.
    """
    run = Path(run)
    _check(pair, settings)
    settings = _chosen(settings.for_pair(pair), pair)
    device = pair.draft_lm.device
    dtype = pair.draft.dtype
    provenance = _provenance(settings, pair)
    trainer, checkpoints = new_trainer(settings, run, loggers, device.type, provenance)
    data = data() if callable(data) else data
    train = train_samples(data, pair, settings)
    splits, of_data = load_splits(data, pair, train, settings)
    checkpoints.provenance |= of_data
    earlier = checkpoint_to_resume(checkpoints)
    logger.info(
        "distilling %s for %s: %d prompts, %s responses, %d epochs, into %s, %s",
        pair.draft_id,
        pair.target_id,
        len(train),
        WHOSE[settings.samples],
        settings.trainer.max_epochs,
        run,
        _needs(pair, train, settings, trainer, run),
    )
    measured = settings.warp, settings.loader.batch_size
    with stage("before") as say:
        before = draft_quality(pair, splits["test"], *measured)
        pair = _reduced(pair, train, settings)
        module = DistillModule(pair, settings)
        module.before = draft_quality(pair, splits["dev"], *measured)
        say(f"overlap with the target {before['overlap']:.3f} on test prompts")
    prepare(pair.draft, settings.gradient_checkpointing)
    batches = ResumableData(splits, settings.loader.batch_size, settings.seed, collate=list)
    precision = settings.trainer.precision
    with (
        deferred() as checkpoints.request,
        fast_products(precision, device.type),
        stage("training") as say,
    ):
        if earlier:
            logger.info("resuming %s", earlier)
        trainer.fit(module, batches, ckpt_path=earlier)
        if not shards_weights(trainer.strategy):
            module.draft.to(device)  # Lightning leaves it on the CPU, and it is measured next
        weights = checkpoints.read_best(trainer) or module.trained_weights([DRAFT])
        if not shards_weights(trainer.strategy):
            module.draft.load_state_dict(weights[DRAFT], strict=False)  # tied weights come once
        say(f"{trainer.global_step:,} steps in {trainer.current_epoch} passes over the prompts")
    if not trainer.is_global_zero:  # the first process of a distributed run writes for all
        return DistilledDraft(run / "draft")
    description = draft_provenance(pair, settings, data.folder, len(train))
    description["steps"] = trainer.global_step
    description["seconds"] = round(checkpoints.seconds, 1)
    description["test"] = {"before": before}
    dev = _dev_overlap(checkpoints, module)
    if dev is not None:
        description["dev"] = dev._asdict()
    with stage("after") as say:
        after = _export(pair, weights[DRAFT], dtype, run / "draft", description, splits, settings)
        say(f"overlap with the target {after['overlap']:.3f} on test prompts")
    metrics = {f"test/{name}": value for name, value in after.items()}
    for each in trainer.loggers:
        each.log_metrics(metrics, trainer.global_step)
    return DistilledDraft(run / "draft", before, after, dev)


def _check(pair: Pair, settings: Distillation) -> None:
    """Raise UserError for a draft that cannot be trained so, before responses are made, which takes
    longest.
    """
    initial = settings.initial_draft
    if initial is not None and pair.draft_id != initial.name:
        is_plain = settings.draft_kind == "stand_alone"
        key = "init_layers" if is_plain else "draft_kind"
        raise UserError(
            f"{key}={shown(getattr(settings, key))} trains a new draft, but the pair has the draft"
            f" {pair.draft_id}; load it with new_draft=settings.initial_draft."
        )
    if settings.stored_dtype == "int8" and isinstance(pair.draft, FeatureDraft):
        raise UserError(
            f"stored_dtype=int8 is of stand-alone drafts, and {pair.draft_id} is stored as other"
            " programs read it; use bfloat16, float16 or float32."
        )
    if settings.form == "safeailab" and isinstance(pair.draft, FeatureDraft):
        check_safeailab(pair.draft.config)
    check_trainable(is_quantized(pair.draft), pair.draft_id)
    pair.check_merged()
    if settings.embedding == "target":
        check_embedding(pair.draft, pair.target)


def _dev_overlap(checkpoints: Checkpoints, module: DistillModule) -> DevOverlap | None:
    """Return the overlap on dev prompts after the best epoch, next to that before the training and
    after the last epoch; None where no epoch was measured.
    """
    best = checkpoints.best.get(DRAFT)
    if best is None:
        return None
    overlaps = list[float]()
    for _, of_step in module.history:
        if "dev/overlap" in of_step:
            overlaps.append(of_step["dev/overlap"])
    return DevOverlap(best.epoch, 1 - best.value, overlaps[-1], module.before["overlap"])


def _reduced(pair: Pair, train: Samples, settings: Distillation) -> Pair:
    """Return the pair with the `settings.draft_vocabulary`: the most frequent tokens of the train
    responses.
    """
    if settings.draft_vocabulary is None:
        return pair
    responses = np.concatenate(list(chain.from_iterable(train.answers)))
    occurring = np.bincount(responses, minlength=pair.vocab_size)
    occurring[list(pair.stop_tokens)] = occurring.sum()
    ranks = -occurring
    count = min(settings.draft_vocabulary, pair.vocab_size)
    lacking = pair.draft_lm.lacking
    if lacking is not None:
        ranks[lacking.cpu().numpy()] = 1
        count = min(count, int((~lacking).sum()))
    kept = np.argsort(ranks, kind="stable")[:count]
    keep_tokens(pair.draft, torch.from_numpy(kept))
    if settings.embedding == "target":
        borrow_embedding(pair.draft, pair.target)
    logger.info("the draft's output keeps %d of %d tokens", len(kept), pair.vocab_size)
    return replace(pair)  # its draft in two steps has the new output


def _needs(pair: Pair, train: Samples, settings: Distillation, trainer: Trainer, run: Path) -> str:
    """Return how much memory and disk training takes, for the log."""
    draft = pair.draft_lm
    batch = settings.loader.batch_size / trainer.world_size
    weights = TrainedWeights.of(pair.draft, settings)
    itemsize = pair.draft.dtype.itemsize
    longest_response = max(map(len, chain.from_iterable(train.answers)))
    longest_prompt = max(map(len, train.prompts))
    texts = batch * (longest_response + longest_prompt)
    num_steps = settings.num_steps if isinstance(pair.draft, FeatureDraft) else 1
    # For the gradient a layer keeps about twice what it takes without; with checkpoints one layer
    # does at a time.
    num_layers = draft.config.num_hidden_layers * num_steps
    num_kept = 2 * (1 if settings.gradient_checkpointing else num_layers)
    rows = 2 * batch * longest_response * num_steps
    more = dict[str, float]()
    if isinstance(pair.draft, FeatureDraft):  # the target reads what is not stored, and dev texts
        features = texts * pair.draft.fc.in_features * itemsize
        more = memory_parts(pair.target_lm, rows=0) | {"the target's states": features}
    parts = trainer.world_size if shards_weights(trainer.strategy) else 1
    # The weights themselves are there.
    state = (weights.num_bytes - weights.num * itemsize) / parts
    memory = memory_of(
        "distilling",
        draft,
        memory_parts(draft, 0, num_kept * texts, rows, (2 + HELD_SLICES) * SLICE_ELEMENTS),
        more,
        {"gradients and the optimizer's state": state},
    )
    return f"{memory}, {space_of('distilling', weights.written_bytes(itemsize), run)}"


def _chosen(settings: Distillation, pair: Pair) -> Distillation:
    """Return settings with what they leave open: of the optimizer, the loss, and the precision.

    CUDA is fastest in bfloat16, and float64 is for tests.
    """
    draft = pair.draft_lm
    settings = settings.for_draft(draft.hidden_size, bool(draft.reads_layers))
    if settings.trainer.precision != "auto":
        return settings
    dtype = pair.draft.dtype
    half = dtype == torch.bfloat16 or (draft.device.type == "cuda" and dtype != torch.float64)
    precision = "bf16-mixed" if half else "32-true"
    return settings.but(trainer=settings.trainer.but(precision=precision))


def prepare(draft: PreTrainedModel, gradient_checkpointing: bool = False) -> None:
    """Make a draft ready to be trained: weights in float32 that may change, and no dropout."""
    # Half-precision weights would round small steps away. Dropout would depend on a random state
    # that no checkpoint holds.
    draft.to(torch.promote_types(draft.dtype, torch.float32)).requires_grad_(True).train()
    if borrows_embedding(draft):
        draft.get_input_embeddings().requires_grad_(False)
    for module in draft.modules():
        for name in DROPOUT:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    if gradient_checkpointing:
        if hasattr(draft, "activation_checkpointing_enable"):  # the name since transformers 5.23
            draft.activation_checkpointing_enable(
                activation_checkpointing_kwargs={"use_reentrant": False}
            )
        else:
            draft.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )


def _provenance(settings: Distillation, pair: Pair) -> dict[str, object]:
    """Return what decides the numbers of a run, besides its data: a run is resumed only if none of
    it has changed.
    """
    return {
        "draft": pair.draft_revision,
        "target": pair.target_revision,
        "dtype": [str(pair.target.dtype), str(pair.draft.dtype)],
        **settings.cache_key(),
    }


def _export(
    pair: Pair,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    folder: Path,
    description: dict[str, Any],
    splits: Mapping[str, Samples],
    settings: Distillation,
) -> dict[str, float]:
    """Write the draft, with `weights` and the best temperature on dev prompts.

    Return its quality on test prompts in `dtype`.
    """
    stored = torch.bfloat16 if dtype == torch.float32 else dtype
    if settings.stored_dtype not in ("auto", "int8"):
        stored = getattr(torch, settings.stored_dtype)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    _write(pair, weights, stored, temporary, settings)
    measured = settings.warp, settings.loader.batch_size
    exported = replace(pair, draft=load_draft(temporary, pair, dtype).model)
    fitted = with_fitted_temperature(exported, splits["dev"], *measured)
    after = draft_quality(fitted, splits["test"], *measured)
    description["temperature"] = draft_temperature(exported.draft.config)
    description["test"]["after"] = after
    if isinstance(exported.draft, FeatureDraft):
        _write(exported, exported.draft.state_dict(), stored, temporary, settings)
    else:
        exported.draft.config.dtype = stored  # it was measured in another
        exported.draft.config.save_pretrained(temporary)
    write_json(temporary / "distill.json", description)
    (temporary / "README.md").write_text(_model_card(description))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
    return after


def _write(
    pair: Pair,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    folder: Path,
    settings: Distillation,
) -> None:
    """Write the draft with `weights` in `dtype` into a folder, in the format of its kind."""
    draft = pair.draft
    if isinstance(draft, FeatureDraft):
        typed = {name: weight.to(dtype) for name, weight in weights.items()}
        if settings.form == "safeailab":
            num_layers = pair.target.config.get_text_config().num_hidden_layers
            write_safeailab(draft, folder, num_layers, typed)
            return
        names = pair.target.config.architectures or [type(pair.target).__name__]
        write_speculators(draft, folder, pair.target_id, names, settings.num_steps, typed)
        return
    form = "Q8_0" if settings.stored_dtype == "int8" else None
    setattr(draft.config, FORM, form)
    with without_bars():
        draft.save_pretrained(folder, state_dict=stored_as(draft, weights, dtype, form))
    draft.config.dtype = dtype  # save_pretrained has set that of the weights in training
    draft.config.save_pretrained(folder)
    pair.tokenizer.save_pretrained(folder)


def draft_provenance(
    pair: Pair, settings: Distillation, data: Path, num_prompts: int
) -> dict[str, object]:
    """Return where a distilled draft comes from: models, settings, data, and what it reads of its
    target.
    """
    reads = None
    if pair.draft_lm.reads_layers:
        reads = {
            "layers": list(pair.draft_lm.reads_layers),
            "steps": settings.num_steps,
            "step_decay": settings.step_decay,
            "format": settings.form,
        }
    return {
        "name": pair.name,
        "draft": pair.origin("draft"),
        "target": pair.origin("target"),
        "reads": reads,
        "init": {
            "layers": settings.init_layers,
            "vocabulary": settings.draft_vocabulary,
            "embedding": settings.embedding,
        },
        "loss": {"divergence": settings.divergence},
        "samples": settings.samples,
        "optimizer": settings.optimizer.values(),
        "warp": settings.warp.values(),
        "data": data.name,
        "num_prompts": num_prompts,
        "seed": settings.seed,
    }


CARD = """---
library_name: {library}
tags: [speculative-decoding, {tag}]
---
# Draft model

A draft for speculative decoding, distilled to propose what its target would say.

| | |
|---|---|
{settings}
Measured on the target's responses to held-out prompts. Overlap is the expected acceptance of a \
drafted token, 1 - TV; the block efficiency follows from it.{depths}

| | before | after |
|---|---|---|
{figures}
```python
pair = specheads.load_pair(draft="<this folder>", target="<the target>")
```

{heads}
"""
HEADS = """Acceptance heads of another draft do not fit this one: train one with `specheads train \
model.draft=<this folder>`."""
OF_TARGET = """It reads the target's hidden states, so it drafts for this target alone."""
DEPTHS = """ `overlap_1` is that of tokens that are drafted after one step with the draft's own \
state, and so on."""


def _model_card(description: Mapping[str, Any]) -> str:
    whose = WHOSE[description["samples"]]
    reads = description.get("reads")
    rows = {
        "target": _model(description["target"]),
        "initial draft": _model(description["draft"]),
        "trained on": f"{whose} responses to {description['num_prompts']:,} prompts",
        "loss": _listed(description["loss"]),
        "steps": f"{description['steps']:,} in {description['seconds']:,} s",
        "draft temperature": f"{description['temperature']:g}, fitted on dev prompts",
        "measured under": _listed(description["warp"]),
    }
    if reads is not None:
        rows["format"] = reads["format"]
        rows["reads"] = f"the inputs of the target's layers {', '.join(map(str, reads['layers']))}"
        rows["steps from each position"] = (
            f"{reads['steps']}, each weighs {reads['step_decay']:g} of the one before"
        )
    settings = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    figures = ""
    for name, value in description["test"]["after"].items():
        figures += f"| {name} | {description['test']['before'][name]:.4f} | {value:.4f} |\n"
    return CARD.format(
        library="transformers" if reads is None else reads["format"],
        tag="draft-model" if reads is None else "eagle3",
        settings=settings,
        depths="" if reads is None else DEPTHS,
        figures=figures,
        heads=HEADS if reads is None else OF_TARGET,
    )


def _model(origin: Mapping[str, str]) -> str:
    return f"{inert(origin['id'])} (revision {inert(origin['revision'])})"


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
