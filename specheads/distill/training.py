"""Distilling a draft: where it starts, what it learns from, and the folder that it becomes."""

import json
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel

from data_gen.__main__ import check_data, data_cache, generation_settings
from data_gen.prompts import SPLITS, Prompt, unique
from data_gen.run import EncodedPrompt, encode_prompts
from data_gen.shards import load_split
from specheads.cli import load_configured_pair
from specheads.distill.card import card
from specheads.distill.laws import LawStore, check_laws
from specheads.distill.loss import LossSettings
from specheads.distill.module import DistillModule, LiveSettings, shards_weights
from specheads.distill.on_policy import OwnResponses
from specheads.distill.samples import Answered, Ragged, Responses, Samples, SampleSettings
from specheads.distill.start import Start
from specheads.errors import UserError, is_count
from specheads.files import write_json
from specheads.interrupts import deferred
from specheads.loading import ResumableData
from specheads.pair import LanguageModel, Pair, load_draft
from specheads.sampling import Warp
from specheads.training import (
    check_named_checkpoint,
    check_positive,
    check_training,
    checkpoint_to_resume,
    new_trainer,
    seeded_training,
    trainer_settings,
)

logger = logging.getLogger(__name__)

HELD_OUT = ("dev", "test")  # splits that a draft is measured on


def train(cfg: DictConfig, pair: Pair | None = None) -> Path:
    """Distil the draft of a config's pair, which may be loaded already; return the folder of the new draft."""
    check(cfg)
    start = start_of(cfg)
    with seeded_training(cfg.seed):
        return distill(cfg, pair or load_configured_pair(cfg, new_draft=None if start.init == "draft" else start))


def check(cfg: DictConfig) -> None:
    """Raise UserError for what can be known to be wrong before models are loaded and data is made."""
    check_training(cfg)
    for split in ("train", "dev", "test"):
        check_positive(f"data.num_{split}", cfg.data[f"num_{split}"])
    check_data(cfg)
    loss, samples = instantiate(cfg.loss), sample_settings(cfg)
    start_of(cfg)
    check_laws(cfg.target_laws.keep, cfg.target_laws.top_k, cfg.target_laws.budget)
    check_positive("validation.num_prompts", cfg.validation.num_prompts)
    check_positive("validation.live_tokens", cfg.validation.live_tokens)
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
    run, settings, loss = Path(cfg.paths.run), sample_settings(cfg), instantiate(cfg.loss)
    optimizer = instantiate(cfg.optimizer).for_width(pair.draft_lm.hidden_size)
    trainer, checkpoints = new_trainer(cfg, pair.draft_lm.device.type)
    if shards_weights(trainer.strategy) and "on_policy" in settings.shares:
        raise UserError(
            f"trainer.strategy={cfg.trainer.get('strategy')} leaves no process a whole draft that could write samples; use samples=target "
            "or text, or +trainer.strategy=ddp."
        )
    reference = reference_of(cfg, pair)
    checkpoints.made_of = decisive_settings(cfg, pair, optimizer, reference, trainer.world_size)
    check_named_checkpoint(cfg.resume, checkpoints.made_of, but="data")
    splits, folder = load_samples(cfg, pair, settings, loss)
    checkpoints.made_of["data"] = folder.name
    saved_dtype = pair.draft.dtype
    prepare(pair.draft, cfg)
    own = OwnResponses(pair, Warp(**cfg.warp), cfg.data.max_new_tokens, cfg.generation.batch_size, cfg.seed)
    live = LiveSettings(cfg.validation.live_prompts, cfg.validation.live_tokens)
    module = DistillModule(pair, loss, optimizer, Warp(**cfg.warp), own, cfg.refresh_every, reference, live)
    data = ResumableData(splits, **cfg.loader, seed=cfg.seed, collate=list)
    announce(cfg, pair, settings, splits, trainer, run)
    earlier = checkpoint_to_resume(cfg.resume, checkpoints)
    if earlier:
        logger.info("goes on from %s", earlier)
    with deferred() as checkpoints.request:
        trainer.fit(module, data, ckpt_path=earlier)
        states = trainer.strategy.lightning_module_state_dict()  # gathered, where processes have parts
        pair.draft.eval()
        trainer.test(module, data, verbose=False)
    exported = run / "draft"
    if trainer.is_global_zero:
        facts = facts_of(cfg, pair, optimizer, module, checkpoints.seconds, trainer.global_step)
        weights = {name.removeprefix("draft."): weight for name, weight in states.items() if name.startswith("draft.")}
        export(pair, weights, saved_dtype, exported, facts)
        report(module, exported)
    return exported


def prepare(draft: PreTrainedModel, cfg: DictConfig) -> None:
    """Make a draft ready to be trained: its weights may change, and are float32 where autocasting does the half-precision work."""
    if not str(cfg.trainer.precision).endswith("-true") or "32" in str(cfg.trainer.precision):
        draft.float()
    draft.requires_grad_(True).train()
    if cfg.gradient_checkpointing:
        draft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def reference_of(cfg: DictConfig, pair: Pair) -> LanguageModel | None:
    """Return the draft that tokens are chosen by, if there is to be one."""
    if cfg.reference is None:
        return None
    return load_draft(cfg.reference, pair, dtype=cfg.model.dtype)


def decisive_settings(
    cfg: DictConfig, pair: Pair, optimizer: Any, reference: LanguageModel | None, num_processes: int
) -> dict[str, Any]:
    """Return what decides the numbers of a training, beside its data: a run goes on only where none of it has changed."""
    return {
        "draft": [pair.draft_id, pair.draft_revision],
        "target": [pair.target_id, pair.target_revision],
        "reference": str(cfg.reference),
        "init": json.dumps(asdict(start_of(cfg)), sort_keys=True),
        "seed": cfg.seed,
        "samples": json.dumps(asdict(sample_settings(cfg)), sort_keys=True),
        "target_laws.top_k": cfg.target_laws.top_k,
        "loader.batch_size": cfg.loader.batch_size,
        "devices": num_processes,
        **{f"loss.{key}": value for key, value in asdict(instantiate(cfg.loss)).items()},
        **{f"optimizer.{key}": value for key, value in asdict(optimizer).items()},
        **trainer_settings(cfg),
    }


# --- what is learnt from


def load_samples(cfg: DictConfig, pair: Pair, settings: SampleSettings, loss: LossSettings) -> tuple[dict[str, Any], Path]:
    """Return the splits: samples for train prompts, the target's responses for dev and test prompts; and the data cache."""
    kinds = settings.shares
    loaded = unique(instantiate(cfg.data.source).load(pair.chats, responses="text" in kinds))
    folder = data_cache(cfg, pair, SPLITS if "target" in kinds else HELD_OUT, loaded)
    splits: dict[str, Any] = {}
    for split, most in (("dev", cfg.validation.num_prompts), ("test", None)):
        rows = load_split(folder, split).with_format("arrow")[:most]
        splits[split] = Answered(*(Ragged.of_column(rows.column(name)) for name in ("prompt_ids", "response_ids")))
    prompts, responses = train_texts(cfg, pair, loaded, kinds, folder)
    laws = {}
    for kind, known in responses.items():
        who = [pair.target_id, pair.target_revision, str(pair.target.dtype)]
        store = LawStore(Path(cfg.paths.data), pair.target_lm, who, prompts, known, loss, cfg.target_laws.top_k)
        num_reads = cfg.trainer.max_epochs * kinds[kind] * len(prompts) / max(1, len(known.tokens))
        if store.is_wanted(cfg.target_laws.keep, cfg.target_laws.budget, num_reads):
            store.make()
            laws[kind] = store
    splits["train"] = Samples(prompts, responses, settings, cfg.seed, laws)
    return splits, folder


def train_texts(
    cfg: DictConfig, pair: Pair, loaded: Sequence[Prompt], kinds: Mapping[str, float], folder: Path
) -> tuple[Ragged, dict[str, Responses]]:
    """Return the train prompts, of all that were loaded, and by kind the responses to them that are known beforehand."""
    limits = generation_settings(cfg)
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


def announce(cfg: DictConfig, pair: Pair, settings: SampleSettings, splits: Mapping[str, Any], trainer: Any, run: Path) -> None:
    """Say in the log what is about to be done, and how large it is."""
    train, weights = splits["train"], sum(weight.numel() for weight in pair.draft.parameters())
    shares = ", ".join(f"{share:.0%} {kind}" for kind, share in settings.shares.items())
    logger.info(
        "distilling %s (%.1f M weights, %.2f GiB with gradients and the optimiser's state) for %s: %d prompts, responses %s, %d epochs, "
        "into %s",
        pair.draft_id,
        weights / 1e6,
        # AdamW's two moments and the gradient are as wide as the weights.
        4 * sum(weight.numel() * weight.element_size() for weight in pair.draft.parameters()) / 2**30,
        pair.target_id,
        len(train),
        shares,
        trainer.max_epochs,
        run,
    )


# --- what becomes of it


def facts_of(cfg: DictConfig, pair: Pair, optimizer: Any, module: DistillModule, seconds: float, steps: int) -> dict[str, Any]:
    """Return what a distilled draft's folder says of where it comes from."""
    return {
        "name": pair.name,
        "draft": {"id": pair.draft_id, "revision": pair.draft_revision},
        "target": {"id": pair.target_id, "revision": pair.target_revision},
        "init": asdict(start_of(cfg)),
        "loss": asdict(module.loss),
        "samples": asdict(sample_settings(cfg)),
        "optimizer": asdict(optimizer),
        "warp": OmegaConf.to_container(cfg.warp),
        "data": cfg.data.get("path") or cfg.model.name,
        "num_prompts": len(module.trainer.datamodule.splits["train"]),
        "steps": steps,
        "seconds": round(seconds, 1),
        "seed": cfg.seed,
        "test": module.results,
    }


def export(pair: Pair, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the draft as an ordinary transformers folder, with tokenizer, card and `distill.json`; it appears by rename."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    pair.draft.to(dtype).save_pretrained(temporary, state_dict={name: weight.to(dtype) for name, weight in weights.items()})
    pair.tokenizer.save_pretrained(temporary)
    write_json(temporary / "distill.json", facts)
    (temporary / "README.md").write_text(card(facts))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def report(module: DistillModule, folder: Path) -> None:
    """Print what distillation has changed on test prompts."""
    before, after = module.results["before"], module.results["after"]
    print(f"\n{'on test prompts':<24}{'before':>10}{'after':>10}{'change':>10}")
    for name, value in after.items():
        change = f"{value / before[name] - 1:+10.1%}" if before[name] else f"{'-':>10}"
        print(f"{name:<24}{before[name]:10.4f}{value:10.4f}{change}")
    print(f"\ndraft: {folder}")
