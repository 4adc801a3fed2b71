"""Training heads: what a config asks for, one pass over the draft's states for all of them, and their folders."""

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from data_gen.__main__ import check_data, data_cache
from specheads.commands.command import is_first_process, load_configured_pair
from specheads.errors import UserError
from specheads.evaluation.calibrate import calibrate
from specheads.features import ROUND_INPUTS
from specheads.heads.batch import collate
from specheads.heads.checkpoint import save_head
from specheads.heads.config import HeadConfig
from specheads.heads.head import NUM_GOLDEN
from specheads.heads.train_prompts import TrainPrompts
from specheads.interrupts import deferred
from specheads.pair import Pair
from specheads.storage.data_set import load_split
from specheads.storage.files import write_json
from specheads.training.heads.bank import HeadBank, HeadSpec
from specheads.training.heads.feature_store import FeatureStore, check_choice
from specheads.training.heads.head_module import HeadModule
from specheads.training.heads.mixed_responses import MixedResponses, check_label, check_rollouts, checked_share
from specheads.training.heads.train_share import Rows, check_train_share, first_rows
from specheads.training.loaders import ResumableData
from specheads.training.trainer import (
    check_named_checkpoint,
    check_positive,
    check_training,
    checkpoint_to_resume,
    new_trainer,
    seeded_training,
    trainer_settings,
)

logger = logging.getLogger(__name__)


def train(cfg: DictConfig, pair: Pair | None = None) -> Path:
    """Train the heads of a config for its pair, which may be loaded already; return the exported folder."""
    check(cfg)
    # The first process made the data and calibrates; others need the target where heads read its states.
    only_draft = not is_first_process() and not any("target_hidden" in spec.config.inputs for spec in head_specs(cfg, None))
    with seeded_training(cfg.seed):
        return train_heads(cfg, pair or load_configured_pair(cfg, only_draft))


def check(cfg: DictConfig) -> None:
    """Raise UserError for what can be known to be wrong before models are loaded and data is made."""
    counts = {f"data.num_{split}": cfg.data[f"num_{split}"] for split in ("train", "dev", "test")}
    if not isinstance(cfg.calibration, DictConfig | None):
        raise UserError(f"calibration={cfg.calibration} is no set of keys; give calibration.num_prompts, or null for none.")
    counts |= {f"calibration.{key}": value for key, value in (cfg.calibration or {}).items()}
    for key, value in counts.items():
        check_positive(key, value)
    check_training(cfg)
    if cfg.optimizer.lr is None:
        raise UserError("optimizer.lr=null is for task=distill; give a head a learning rate, for example 3e-3.")
    if not isinstance(cfg.head, DictConfig):
        raise UserError(
            f"head={cfg.head} is a key of evaluate.py; what is trained is said by head.depth=, head.width= and the like."
        )
    check_train_share(cfg.train_share)
    check_choice(cfg.features, cfg.features_budget)
    check_data(cfg)
    labels = _choices(cfg.head.label)
    for label in labels:
        check_label(label)
    check_rollouts(labels, cfg.generation.rollouts_per_response)
    specs = head_specs(cfg, None)
    share = checked_share(specs[0].config.predicts, cfg.mixing.response_share)
    if share < 1 and any("target_hidden" in spec.config.inputs for spec in specs):
        raise UserError(
            f"mixing.response_share={share} mixes drafted tokens into the text, but target_hidden in head.inputs is the state of a target "
            "that has read its own text alone; leave mixing.response_share=null or 1."
        )


def train_heads(cfg: DictConfig, pair: Pair) -> Path:
    """Train heads on the pair's draft, all in one pass over its states; return the folder of the head, or of all of them."""
    run = Path(cfg.paths.run)
    specs = head_specs(cfg, pair)
    predicts, labels = specs[0].config.predicts, list(dict.fromkeys(spec.config.label for spec in specs))
    share = checked_share(predicts, cfg.mixing.response_share)
    optimizer = instantiate(cfg.optimizer)
    trainer, checkpoints = new_trainer(cfg, pair.draft_lm.device.type)
    checkpoints.provenance = cache_key(cfg, specs, share, trainer.world_size)
    check_named_checkpoint(cfg.resume, checkpoints.provenance, but=["data"])  # known once it is there, which may take hours
    folder = data_cache(cfg, pair)
    checkpoints.provenance["data"] = folder.name
    module = HeadModule(HeadBank(specs, cfg.seed), pair.draft_lm, optimizer, pair.target_lm)
    learnt = {"train": labels, "dev": labels, "test": ["sampled"]}  # what test prompts are asked needs no rollouts
    mixing, rounds = (predicts, share, cfg.seed), bool(module.bank.needs & set(ROUND_INPUTS))
    texts = {name: MixedResponses(load_split(folder, name), *mixing, own, rounds) for name, own in learnt.items()}
    prompt_ids = load_split(folder, "train")["prompt_id"][:]
    rows = first_rows(prompt_ids, cfg.train_share)
    read = {name: texts[name] for name in ("train", "dev")}  # in every epoch
    store = FeatureStore(
        folder, pair.draft_lm, read, module.bank.needs, trainer.max_epochs, pair.target_lm, {"train": rows[-1] + 1}
    )
    splits = texts | store.splits_by(cfg.features, cfg.features_budget)
    splits["train"] = Rows(splits["train"], rows)
    num_prompts = len({prompt_ids[row] for row in rows})
    data = ResumableData(splits, **cfg.loader, seed=cfg.seed, collate=collate)
    earlier = checkpoint_to_resume(cfg.resume, checkpoints)
    with deferred() as checkpoints.request:
        logger.info(
            "training %s: %d responses to %d train prompts, %d to dev prompts, %d epochs, into %s%s",
            specs[0].name if len(specs) == 1 else f"{len(specs)} heads",
            len(rows),
            num_prompts,
            len(splits["dev"]),
            trainer.max_epochs,
            run,
            f", going on from {earlier}" if earlier else "",
        )
        trainer.fit(module, data, ckpt_path=earlier)
        trainer.test(module, data, verbose=False)
    if not trainer.is_global_zero:
        return run  # the first process of a distributed run writes for all
    facts = {"num_prompts": num_prompts, "num_responses": len(rows), "train_share": cfg.train_share}
    learned = TrainPrompts.of(load_split(folder, "train").select(rows)["prompt"][:])
    exported = export(module, data, pair.draft_lm.device, run, facts | {"seconds": round(checkpoints.seconds, 1)}, learned)
    folders = [run / "heads" / spec.name for spec in specs]
    report(module, exported, calibrate(cfg, pair, folders) if cfg.calibration else {})
    return exported


def cache_key(cfg: DictConfig, specs: Sequence[HeadSpec], response_share: float, num_processes: int) -> dict[str, Any]:
    """Return what decides the numbers of a training, beside its data: a run goes on only where none of it has changed."""
    return {
        "head": json.dumps([asdict(spec) for spec in specs], sort_keys=True),
        "seed": cfg.seed,
        "train_share": cfg.train_share,
        "mixing.response_share": response_share,
        "loader.batch_size": cfg.loader.batch_size,
        "devices": num_processes,
        **{f"optimizer.{key}": value for key, value in asdict(instantiate(cfg.optimizer)).items()},
        **trainer_settings(cfg),
    }


def head_specs(cfg: DictConfig, pair: Pair | None) -> list[HeadSpec]:
    """Return every head that the config describes, for this pair: where a setting is a list of values, each combination.

    Without a pair the heads have sizes of 1, to be checked before models are loaded.
    """
    of_pair = {"hidden_size": 1, "embedding_size": 1}
    if pair is not None:
        of_pair = {
            "hidden_size": pair.draft_lm.hidden_size,
            "embedding_size": pair.draft.get_input_embeddings().weight.shape[1],
            "vocab_size": pair.vocab_size,
            "draft": {"id": pair.draft_id, "revision": pair.draft_revision},
            "target": {"id": pair.target_id, "revision": pair.target_revision},
        }
    target_size = 1 if pair is None else pair.target_lm.hidden_size
    if not isinstance(cfg.head.inputs, ListConfig):
        raise UserError(
            f"head.inputs={cfg.head.inputs} is no list; write for example 'head.inputs=[hidden]', or [] for the usual ones."
        )
    if not isinstance(cfg.head.predicts, str):
        raise UserError(
            f"head.predicts={cfg.head.predicts} is not one value; heads of one run share it. Use -m for several runs."
        )
    choices = {f"head.{key}": _choices(cfg.head[key]) for key in ("depth", "width", "label")}
    inputs = OmegaConf.to_container(cfg.head.inputs)
    choices["head.inputs"] = inputs if any(isinstance(names, list) for names in inputs) else [inputs]
    choices |= {f"loss.{key}": _choices(value) for key, value in cfg.loss.items()}
    if empty := [key for key, values in choices.items() if not values]:
        raise UserError(f"{empty[0]}=[] names no value; give one, or several.")
    if any(not isinstance(names, list) for names in choices["head.inputs"]):
        raise UserError(f"head.inputs={inputs} mixes names and lists; give a list of names, or a list of such lists.")
    specs = []
    for values in itertools.product(*choices.values()):
        own = dict(zip(choices, values, strict=True))
        config = HeadConfig(
            target_size=target_size if "target_hidden" in own["head.inputs"] else None,
            depth=own["head.depth"],
            width=own["head.width"],
            predicts=cfg.head.predicts,
            inputs=tuple(own["head.inputs"]),
            label=own["head.label"],
            warp=OmegaConf.to_container(cfg.warp),
            **of_pair,
        )
        weights = {key.removeprefix("loss."): value for key, value in own.items() if key.startswith("loss.")}
        spec = HeadSpec("", config, **weights)
        if spec.survival_weighted and config.label != "rollout":
            raise UserError(
                f"loss.survival_weighted=true changes nothing with head.label={config.label}, which has no rounds; use it with "
                "head.label=rollout."
            )
        tags = {
            "head.width": f"w{config.width}",
            "loss.accept_weight": f"a{spec.accept_weight:g}",
            "loss.survival_weighted": "survival" if spec.survival_weighted else "even",
            "head.label": config.label,
            "head.inputs": "+".join(config.inputs),
        }
        more = [tag for key, tag in tags.items() if len(choices[key]) > 1]
        name = "-".join([config.predicts, f"d{config.depth}", f"r{spec.reject_weight:g}", *more]).replace(".", "_")
        specs.append(replace(spec, name=name))
    if len({spec.name for spec in specs}) < len(specs):
        raise UserError("the same head is asked for twice; give each value of each setting once.")
    return specs


def _choices(value: Any) -> list[Any]:
    return list(value) if isinstance(value, ListConfig) else [value]


def export(
    module: HeadModule,
    data: ResumableData,
    draft_device: torch.device,
    run: Path,
    trained: Mapping[str, Any],
    learned: TrainPrompts,
) -> Path:
    """Write every head of the bank as a folder of its own, with how they were `trained` and on which prompts (`learned`); return that of
    the only one, or the one above of several.
    """
    module.to(draft_device)  # Lightning leaves the heads on the CPU
    with torch.no_grad():
        features = module.features(next(iter(data.loader("dev"))).to(draft_device))
    module.check_not_constant(features)
    heads = module.bank.heads
    for spec in module.bank.specs:
        head = heads[spec.name]
        facts = {"optimizer": asdict(module.optimizer), "accept_weight": spec.accept_weight, "reject_weight": spec.reject_weight}
        facts |= {
            "survival_weighted": spec.survival_weighted,
            **trained,
            "test": module.test_results[spec.name],
        }
        head.config, head.train_prompts = replace(head.config, train=facts), learned
        inputs = head.assemble({name: value[:NUM_GOLDEN] for name, value in features.items()})
        folder = save_head(head, run / "heads" / spec.name, inputs)
    write_json(run / "test.json", module.test_results)
    return folder if len(heads) == 1 else folder.parent


def report(module: HeadModule, folder: Path, errors: Mapping[str, Mapping[str, float]]) -> None:
    """Print how the heads compare with what needs no head, how well they are calibrated in rounds, and where they are."""
    print(f"\n{'on held-out prompts':<28}{'AUROC':>8}{'KL':>8}{'Brier':>8}{'ECE':>8}")
    for name, metrics in module.test_results.items():
        cells = "".join(f"{metrics[key]:8.3f}" if key in metrics else f"{'-':>8}" for key in ("auroc", "kl", "brier", "ece"))
        print(f"{name:<28}{cells}")
    if errors:
        print(
            f"\n{'in rounds on dev prompts':<28}{'ECE':>8}{'calibrated':>12}  (fitted on one half of them, measured on the other)"
        )
    for name, own in errors.items():
        print(f"{name:<28}{own['raw']:8.3f}{own['cross_fitted']:12.3f}")
    print(f"\n{'head' if len(module.bank.specs) == 1 else 'heads'}: {folder}")
