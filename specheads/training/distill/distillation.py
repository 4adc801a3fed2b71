"""Distilling a draft: where it starts, what it learns from, and the folder that it becomes."""

import contextlib
import json
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from lightning import Trainer
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from data_gen.__main__ import check_data, data_cache
from data_gen.settings import Generation
from specheads.commands.compose import load_configured_pair, settings_of, source_of
from specheads.commands.loggers import new_logger
from specheads.errors import UserError, is_count
from specheads.interrupts import deferred
from specheads.pair import LanguageModel, Pair, load_draft
from specheads.prompts.encoding import EncodedPrompt, encode_prompts
from specheads.prompts.prompt import SPLITS, Prompt, unique
from specheads.revisions import revision_of
from specheads.sampling import Warp
from specheads.storage.data_set import load_split
from specheads.storage.files import write_json
from specheads.training.distill.distill_loss import LossSettings
from specheads.training.distill.distill_module import DistillModule, shards_weights
from specheads.training.distill.draft_card import card
from specheads.training.distill.measures import LiveSettings, live_measures, measured
from specheads.training.distill.on_policy import DraftResponses
from specheads.training.distill.samples import Answered, Ragged, Responses, Samples, SampleSettings
from specheads.training.distill.start import Start
from specheads.training.distill.target_store import TargetStore, check_target_probs, fingerprint_of
from specheads.training.loaders import ResumableData
from specheads.training.optimizer import DraftOptimizer, Optimizer
from specheads.training.trainer import check_named_checkpoint, checkpoint_to_resume, new_trainer, seeded_training
from specheads.training.trainer_settings import Checkpointing, Loader, TrainerSettings

logger = logging.getLogger(__name__)

HELD_OUT = ("dev", "test")  # splits that a draft is measured on
OF_DATA = ("data", "texts", "stored laws")  # what of a checkpoint is known once the data is there, which may take hours
# What dropout is called in transformers' modules.
DROPOUT = ("p", "dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "layerdrop")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def train(cfg: DictConfig, pair: Pair | None = None) -> Path:
    """Distil the draft of a config's pair, which may be loaded already; return the folder of the new draft."""
    check(cfg)
    start = start_of(cfg)
    with seeded_training(cfg.seed):
        return distill(cfg, pair or load_configured_pair(cfg, new_draft=None if start.init == "draft" else start))


def check(cfg: DictConfig) -> None:
    """Raise UserError for what can be known to be wrong before models are loaded and data is made."""
    check_groups(cfg)
    for key, settings in (
        ("loader", Loader),
        ("checkpoint", Checkpointing),
        ("trainer", TrainerSettings),
        ("optimizer", DraftOptimizer),
    ):
        settings.at(key, OmegaConf.to_container(cfg[key], resolve=True))
    if cfg.trainer.precision not in PRECISIONS:
        raise UserError(
            f"trainer.precision={cfg.trainer.precision} does not fit a draft, whose weights are trained in float32: half-precision ones lose "
            f"small steps. Use one of {', '.join(PRECISIONS)}."
        )
    for split in ("train", "dev", "test"):
        _check_positive(f"data.num_{split}", cfg.data[f"num_{split}"])
    check_data(cfg)
    loss, samples = instantiate(cfg.loss), sample_settings(cfg)
    start_of(cfg)
    check_target_probs(cfg.target_probs.keep, cfg.target_probs.top_k, cfg.target_probs.budget)
    _check_positive("validation.num_prompts", cfg.validation.num_prompts)
    _check_positive("write_batch_size", cfg.write_batch_size)
    _check_positive("validation.live_tokens", cfg.validation.live_tokens)
    if not is_count(cfg.validation.live_prompts):
        raise UserError(f"validation.live_prompts={cfg.validation.live_prompts} is no count; 0 decodes none.")
    if not isinstance(cfg.gradient_checkpointing, bool):
        raise UserError(f"gradient_checkpointing={cfg.gradient_checkpointing} is neither true nor false.")
    if (loss.token_share < 1) != (cfg.reference is not None):
        raise UserError(
            f"loss.token_share={loss.token_share} and reference={cfg.reference} go together: the tokens to learn from are chosen by what "
            "a reference draft, distilled before, has learnt of them. Give both, for example loss.token_share=0.4 "
            "reference=outputs/distill/<date_time>/draft, or neither."
        )
    if samples.samples == "mixed" and len(samples.shares) == 1:
        logger.warning("samples=mixed has only %s in it", *samples.shares)


def _check_positive(key: str, value: Any) -> None:
    if not is_count(value, least=1):
        raise UserError(f"{key}={value} must be a positive integer.")


def check_groups(cfg: DictConfig) -> None:
    """Raise UserError for sets of keys that are none, or that have keys which nothing reads."""
    for name in ("loss", "optimizer", "loader", "validation", "target_probs", "checkpoint", "trainer"):
        if not isinstance(cfg[name], DictConfig):
            raise UserError(f"{name}={cfg[name]} is no set of keys; leave it out for the usual ones.")
    for name, known in (("loss", LossSettings),):
        names = {"_target_", *(field.name for field in fields(known))}
        if unknown := sorted(set(cfg[name]) - names):
            raise UserError(f"{name}.{unknown[0]} is not known; {name} has {', '.join(sorted(names - {'_target_'}))}.")


def start_of(cfg: DictConfig) -> Start:
    """Return where a config lets distillation begin."""
    layers, config = (
        OmegaConf.to_container(OmegaConf.create({"value": cfg[key]}))["value"] for key in ("init_layers", "init_config")
    )
    if not isinstance(config, dict | None):
        raise UserError(f"init_config={config} is no set of keys; give for example 'init_config={{num_hidden_layers: 2}}'.")
    return Start(cfg.init, layers, config or {}, cfg.seed)


def sample_settings(cfg: DictConfig) -> SampleSettings:
    """Return where a config takes responses from."""
    if not isinstance(cfg.mixed, DictConfig):
        raise UserError(f"mixed={cfg.mixed} is no set of keys; give for example mixed.target=0.5 mixed.on_policy=0.5.")
    return SampleSettings(cfg.samples, OmegaConf.to_container(cfg.mixed), cfg.refresh_every)


def distill(cfg: DictConfig, pair: Pair) -> Path:
    """Train the pair's draft; return the folder that it was exported to."""
    run, settings, loss, warp = Path(cfg.paths.run), sample_settings(cfg), instantiate(cfg.loss), Warp(**cfg.warp)
    optimizer = DraftOptimizer.at("optimizer", OmegaConf.to_container(cfg.optimizer)).for_width(pair.draft_lm.hidden_size)
    trainer_settings = TrainerSettings.at("trainer", OmegaConf.to_container(instantiate(cfg.trainer), resolve=True))
    loggers = [new_logger(each, run) for each in (cfg.get("logger") or {}).values()]
    checkpointing = Checkpointing.at("checkpoint", cfg.checkpoint)
    trainer, checkpoints = new_trainer(trainer_settings, checkpointing, run, loggers, pair.draft_lm.device.type)
    check_trainer(cfg, trainer, settings)
    reference = reference_of(cfg, pair)
    checkpoints.provenance = cache_key(cfg, pair, optimizer, trainer.world_size)
    if reference:
        checkpoints.provenance["reference"] = revision_of(reference.model, cfg.reference)
    check_named_checkpoint(cfg.resume, checkpoints.provenance, but=OF_DATA)
    splits, texts = load_samples(cfg, pair, settings, loss)
    checkpoints.provenance |= texts
    check_sizes(splits, trainer.world_size)
    earlier = checkpoint_to_resume(cfg.resume, checkpoints)
    live = LiveSettings(cfg.validation.live_prompts, cfg.validation.live_tokens)
    own = DraftResponses(pair, warp, cfg.data.max_new_tokens, cfg.write_batch_size, cfg.seed)
    module = DistillModule(pair, loss, optimizer, warp, own, cfg.refresh_every, reference, live)
    announce(cfg, pair, settings, splits, trainer, run)
    logger.info("measuring the draft as it is")
    before = measured(pair, splits["test"], warp, cfg.loader.batch_size)
    module.before = measured(pair, splits["dev"], warp, cfg.loader.batch_size) | live_measures(pair, splits["dev"], warp, live)
    saved_dtype = pair.draft.dtype
    prepare(pair.draft, cfg.gradient_checkpointing)
    if earlier:
        logger.info("goes on from %s", earlier)
    data = ResumableData(splits, **cfg.loader, seed=cfg.seed, collate=list)
    with deferred() as checkpoints.request:
        trainer.fit(module, data, ckpt_path=earlier)
        states = trainer.strategy.lightning_module_state_dict()  # gathered, where processes have parts
    folder = run / "draft"
    if not trainer.is_global_zero:
        return folder
    weights = {name.removeprefix("draft."): weight for name, weight in states.items() if name.startswith("draft.")}
    facts = facts_of(cfg, pair, optimizer, loss, len(splits["train"])) | {
        "steps": trainer.global_step,
        "seconds": round(checkpoints.seconds, 1),
    }
    with exported(pair, weights, saved_dtype, folder) as temporary:
        new = replace(pair, draft=load_draft(temporary, pair, saved_dtype).model)
        results = {"before": before, "after": measured(new, splits["test"], warp, cfg.loader.batch_size)}
        write_json(temporary / "distill.json", facts | {"test": results})
        (temporary / "README.md").write_text(card(facts | {"test": results}))
    report(results, folder, trainer)
    return folder


def check_trainer(cfg: DictConfig, trainer: Trainer, settings: SampleSettings) -> None:
    """Raise UserError for what several processes cannot do."""
    if shards_weights(trainer.strategy):
        if "on_policy" in settings.shares:
            raise UserError(
                f"trainer.strategy={cfg.trainer.strategy} leaves no process a whole draft that could write samples; use samples=target "
                "or text, or +trainer.strategy=ddp."
            )
        if cfg.trainer.gradient_clip_val is not None:
            raise UserError(
                f"trainer.gradient_clip_val={cfg.trainer.gradient_clip_val}: with trainer.strategy={cfg.trainer.strategy} the norm of a gradient "
                "that is in parts cannot be limited; give trainer.gradient_clip_val=null."
            )
    if trainer.world_size > 1 and cfg.model.device_map:
        raise UserError(
            f"model.device_map={cfg.model.device_map} with trainer.devices={cfg.trainer.devices}: each process would spread a target of its "
            "own over all GPUs; use trainer.devices=1, or a target that fits each GPU and model.device_map=null."
        )


def check_sizes(splits: Mapping[str, Dataset], world_size: int) -> None:
    """Raise UserError for splits that leave a process without a text."""
    keys = {"train": "data.num_train", "dev": "validation.num_prompts", "test": "data.num_test"}
    for split, key in keys.items():
        if len(splits[split]) < world_size:
            raise UserError(
                f"{len(splits[split])} {split} texts are too few for {world_size} processes; ask for more with {key}."
            )


def prepare(draft: PreTrainedModel, gradient_checkpointing: bool = False) -> None:
    """Make a draft ready to be trained: weights in float32 that may change, and nothing dropped at random.

    Small steps would be lost in the rounding of half-precision weights. What is dropped would depend on a state that no checkpoint has.
    """
    draft.to(torch.promote_types(draft.dtype, torch.float32)).requires_grad_(True).train()
    for module in draft.modules():
        for name in DROPOUT:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    if gradient_checkpointing:
        draft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def reference_of(cfg: DictConfig, pair: Pair) -> LanguageModel | None:
    """Return the draft that tokens are chosen by, if there is to be one."""
    if cfg.reference is None:
        return None
    return load_draft(cfg.reference, pair, dtype=cfg.model.dtype)


def cache_key(cfg: DictConfig, pair: Pair, optimizer: Optimizer, num_processes: int) -> dict[str, Any]:
    """Return what decides the numbers of a training, beside its data: a run goes on only where none of it has changed."""
    return {
        "draft": [pair.draft_id, pair.draft_revision],
        "target": [pair.target_id, pair.target_revision],
        "init": json.dumps(asdict(start_of(cfg)), sort_keys=True),
        "seed": cfg.seed,
        "samples": json.dumps(asdict(sample_settings(cfg)), sort_keys=True),
        "write_batch_size": cfg.write_batch_size,
        "loader.batch_size": cfg.loader.batch_size,
        "devices": num_processes,
        **{f"loss.{key}": value for key, value in asdict(instantiate(cfg.loss)).items()},
        **{f"optimizer.{key}": value for key, value in optimizer.values().items()},
        **TrainerSettings.at("trainer", OmegaConf.to_container(cfg.trainer, resolve=True)).cache_key(),
    }


# --- what is learnt from


def load_samples(
    cfg: DictConfig, pair: Pair, settings: SampleSettings, loss: LossSettings
) -> tuple[dict[str, Dataset], dict[str, Any]]:
    """Return the splits, samples for train prompts and the target's responses for others, and what they are made of (OF_DATA)."""
    kinds = settings.shares
    loaded = unique(source_of(cfg).load(pair.chats, responses="text" in kinds))
    folder = data_cache(cfg, pair, SPLITS if "target" in kinds else HELD_OUT, loaded, labelled=False).folder
    splits: dict[str, Dataset] = {}
    for split, most in (("dev", cfg.validation.num_prompts), ("test", None)):
        rows = load_split(folder, split).with_format("arrow")[:most]
        splits[split] = Answered(*(Ragged.of_column(rows.column(name)) for name in ("prompt_ids", "response_ids")))
    prompts, responses = train_texts(cfg, pair, loaded, kinds, folder)
    distributions = {}
    for kind, known in responses.items():
        who = [pair.target_id, pair.target_revision, str(pair.target.dtype)]
        store = TargetStore(Path(cfg.paths.data), pair.target_lm, who, prompts, known, loss, cfg.target_probs.top_k)
        num_reads = cfg.trainer.max_epochs * kinds[kind] * len(prompts) / max(1, len(known.tokens))
        if store.is_wanted(cfg.target_probs.keep, cfg.target_probs.budget, num_reads):
            store.make()
            distributions[kind] = store
    splits["train"] = Samples(prompts, responses, settings, cfg.seed, distributions)
    stored = {kind: store.facts["law"] for kind, store in distributions.items()}
    return splits, {"data": folder.name, "texts": fingerprint_of(prompts, responses), "stored laws": json.dumps(stored)}


def train_texts(
    cfg: DictConfig, pair: Pair, loaded: Sequence[Prompt], kinds: Mapping[str, float], folder: Path
) -> tuple[Ragged, dict[str, Responses]]:
    """Return the train prompts, of all that were loaded, and by kind the responses to them that are known beforehand."""
    limits = settings_of(Generation, cfg).limits
    encoded = encode_prompts(pair, [prompt for prompt in loaded if prompt.split == "train"], limits)
    found: dict[str, dict[str, list]] = {}
    if "text" in kinds:
        most = limits.max_new_tokens
        found["text"] = {
            prompt.prompt_id: [own_response(pair, prompt.response, len(ids), most)] for prompt, ids in encoded if prompt.response
        }
    if "target" in kinds:
        rows = load_split(folder, "train").with_format("arrow")[:]
        answers: dict[str, list] = defaultdict(list)
        for prompt_id, response in zip(rows.column("prompt_id").to_pylist(), rows.column("response_ids").to_numpy(), strict=True):
            answers[prompt_id].append(response)
        found["target"] = answers
    kept = [row for row in encoded if all(row[0].prompt_id in known for known in found.values())]
    if not kept:
        raise UserError(
            f"no train prompt has responses of every kind in samples={cfg.samples}; ask for more with data.num_train."
        )
    return Ragged([ids for _, ids in kept]), {kind: _responses(kept, known) for kind, known in found.items()}


def own_response(pair: Pair, text: str, prompt_length: int, max_new_tokens: int) -> list[int]:
    """Return the ids of a data set's own response with an end token, cut to the limits."""
    ids = pair.tokenizer(text, add_special_tokens=False)["input_ids"]
    own_end = pair.tokenizer.eos_token_id
    end = own_end if own_end in pair.stop_tokens else min(pair.stop_tokens, default=None)
    return [*ids, *([] if end is None else [end])][: min(max_new_tokens, pair.window - prompt_length)]


def _responses(prompts: list[EncodedPrompt], known: Mapping[str, list]) -> Responses:
    rows = [known[prompt.prompt_id] for prompt, _ in prompts]
    numbers = iter(range(sum(map(len, rows))))
    return Responses(Ragged([response for row in rows for response in row]), [[next(numbers) for _ in row] for row in rows])


def announce(
    cfg: DictConfig, pair: Pair, settings: SampleSettings, splits: Mapping[str, Dataset], trainer: Trainer, run: Path
) -> None:
    """Say in the log what is about to be done, and how large it is."""
    train, weights = splits["train"], sum(weight.numel() for weight in pair.draft.parameters())
    shares = ", ".join(f"{share:.0%} {kind}" for kind, share in settings.shares.items())
    logger.info(
        "distilling %s (%.1f M weights, %.2f GiB with gradients and the optimiser's state) for %s: %d prompts, responses %s, %d epochs, "
        "into %s",
        pair.draft_id,
        weights / 1e6,
        16 * weights / 2**30,  # all in float32: the weights, their gradients, AdamW's two moments
        pair.target_id,
        len(train),
        shares,
        trainer.max_epochs,
        run,
    )


# --- what becomes of it


def facts_of(cfg: DictConfig, pair: Pair, optimizer: Optimizer, loss: LossSettings, num_prompts: int) -> dict[str, Any]:
    """Return what a distilled draft's folder says of where it comes from."""
    return {
        "name": pair.name,
        "draft": {"id": pair.draft_id, "revision": pair.draft_revision},
        "target": {"id": pair.target_id, "revision": pair.target_revision},
        "init": asdict(start_of(cfg)),
        "loss": asdict(loss),
        "samples": asdict(sample_settings(cfg)),
        "optimizer": optimizer.values(),
        "warp": OmegaConf.to_container(cfg.warp),
        "data": cfg.data.get("path") or cfg.model.name,
        "num_prompts": num_prompts,
        "seed": cfg.seed,
    }


@contextlib.contextmanager
def exported(pair: Pair, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, folder: Path) -> Iterator[Path]:
    """Write the draft as an ordinary transformers folder with its tokenizer; the block adds to it, and then it gets its name."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    pair.draft.save_pretrained(temporary, state_dict={name: weight.to(dtype) for name, weight in weights.items()})
    pair.draft.config.dtype = dtype  # which save_pretrained has set to that of the weights in training
    pair.draft.config.save_pretrained(temporary)
    pair.tokenizer.save_pretrained(temporary)
    yield temporary
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def report(results: Mapping[str, Mapping[str, float]], folder: Path, trainer: Trainer) -> None:
    """Print and log what distillation has changed on test prompts."""
    before, after = results["before"], results["after"]
    for each in trainer.loggers:
        each.log_metrics({f"test/{name}": value for name, value in after.items()}, trainer.global_step)
    print(f"\n{'on test prompts':<24}{'before':>10}{'after':>10}{'change':>10}")
    for name, value in after.items():
        change = f"{value / before[name] - 1:+10.1%}" if before[name] else f"{'-':>10}"
        print(f"{name:<24}{before[name]:10.4f}{value:10.4f}{change}")
    print(f"\ndraft: {folder}")
