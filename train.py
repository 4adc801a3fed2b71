"""`python train.py model=llama2-7b`: train an acceptance head, making the data first where it is missing.

`python train.py --help` lists every key; `-m head.depth=0,1,2,3,4 loss.reject_weight=1,3,6,12` sweeps.
"""

import itertools
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import wandb
from hydra.utils import instantiate
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.plugins.environments import LightningEnvironment
from omegaconf import DictConfig, ListConfig, OmegaConf

from data_gen.__main__ import check_data, data_cache
from data_gen.shards import load_split
from specheads.checkpoints import Checkpoints, TimeToGo, differences
from specheads.cli import command, is_first_process, load_configured_pair, next_command
from specheads.errors import UserError, is_count, is_number
from specheads.evaluation.calibrate import calibrate
from specheads.files import write_json
from specheads.heads.bank import HeadBank, HeadSpec
from specheads.heads.checkpoint import NUM_GOLDEN, save_head
from specheads.heads.head import ROUND_INPUTS, HeadConfig
from specheads.heads.loading import HeadData
from specheads.heads.module import HeadModule
from specheads.heads.share import Rows, check_train_share, first_rows
from specheads.heads.store import FeatureStore, check_choice
from specheads.heads.texts import ROLLOUT_LABELS, MixedResponses, check_label, check_rollouts, checked_share
from specheads.interrupts import deferred
from specheads.loggers import new_logger
from specheads.pair import Pair
from specheads.runs import is_resumed

logger = logging.getLogger(__name__)

# What the trainer may be told and would not be resumed exactly, or not at all; a missing key has the value that fits.
UNFIT = {
    "num_nodes": ("heads are trained on one machine", lambda value: value == 1),
    "val_check_interval": (
        "a number of steps or a share of an epoch can be resumed",
        lambda value: value is None or is_number(value),
    ),
    "check_val_every_n_epoch": ("a count of epochs can be resumed", lambda value: is_count(value, least=1)),
    "reload_dataloaders_every_n_epochs": ("the data stays the same from epoch to epoch", lambda value: value == 0),
}
WHERE_TO_TRAIN = ("_target_", "accelerator", "devices", "default_root_dir")  # trainer keys that change no number


def train(cfg: DictConfig, pair: Pair | None = None) -> Path:
    """Train what `cfg.task` names for its pair, which may be loaded already; return the exported folder."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*LeafSpec.*",
        ".*sync_dist=True.*",  # what we log was gathered from all processes
        ".*logs directory .* exists and is not empty.*",
    ):  # what Lightning says about itself
        warnings.filterwarnings("ignore", message)
    check(cfg)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    try:
        # The first process made the data and calibrates; others need the target where heads read its states.
        only_draft = not is_first_process() and not any("target_hidden" in spec.config.inputs for spec in head_specs(cfg, None))
        return train_head(cfg, pair or load_configured_pair(cfg, only_draft))
    finally:
        wandb.finish()  # or the next job of a sweep would log into this one's run


def check(cfg: DictConfig) -> None:
    """Raise UserError for what can be known to be wrong before models are loaded and data is made."""
    counts = {f"data.num_{split}": cfg.data[f"num_{split}"] for split in ("train", "dev", "test")}
    counts |= {"loader.batch_size": cfg.loader.batch_size, "trainer.max_epochs": cfg.trainer.max_epochs}
    if not isinstance(cfg.calibration, DictConfig | None):
        raise UserError(f"calibration={cfg.calibration} is no set of keys; give calibration.num_prompts, or null for none.")
    counts |= {f"calibration.{key}": value for key, value in (cfg.calibration or {}).items()}
    counts |= {"checkpoint.every_steps": cfg.checkpoint.every_steps, "trainer.log_every_n_steps": cfg.trainer.log_every_n_steps}
    for key, value in counts.items():
        if not is_count(value, least=1):
            raise UserError(f"{key}={value} is not a count of at least 1, and training a head needs one.")
    for key, (reason, fits) in UNFIT.items():
        if key in cfg.trainer and not fits(cfg.trainer[key]):
            raise UserError(f"trainer.{key}={cfg.trainer[key]} is not supported: {reason}; leave it out.")
    if not isinstance(cfg.head, DictConfig):
        raise UserError(
            f"head={cfg.head} is a key of evaluate.py; what is trained is said by head.depth=, head.width= and the like."
        )
    if unknown := sorted(set(cfg.loader) - {"batch_size", "num_workers"}):
        raise UserError(f"loader.{unknown[0]} is not known; loader takes batch_size and num_workers.")
    instantiate(cfg.optimizer)
    check_train_share(cfg.train_share)
    check_choice(cfg.features, cfg.features_budget)
    if not is_count(cfg.loader.num_workers):
        raise UserError(f"loader.num_workers={cfg.loader.num_workers} is no count; 0 reads the data in the training process.")
    check_data(cfg)
    labels = _choices(cfg.head.label)
    for label in labels:
        check_label(label)
    check_rollouts(labels, cfg.generation.rollouts_per_response)
    specs = head_specs(cfg, None)
    share = checked_share(specs[0].config.judges, cfg.mixing.response_share)
    if share < 1 and any("target_hidden" in spec.config.inputs for spec in specs):
        raise UserError(
            f"mixing.response_share={share} mixes drafted tokens into the text, but target_hidden in head.inputs is the state of a target "
            "that has read its own text alone; leave mixing.response_share=null or 1."
        )


def train_head(cfg: DictConfig, pair: Pair) -> Path:
    """Train heads on the pair's draft, all in one pass over its states; return the folder of the head, or of all of them."""
    run = Path(cfg.paths.run)
    specs = head_specs(cfg, pair)
    judges, labels = specs[0].config.judges, list(dict.fromkeys(spec.config.label for spec in specs))
    share = checked_share(judges, cfg.mixing.response_share)
    optimizer = instantiate(cfg.optimizer)
    loggers = [new_logger(logger_config, run) for logger_config in (cfg.get("logger") or {}).values()]
    checkpoints = Checkpoints(run / "checkpoints" / "last.ckpt", cfg.checkpoint.every_steps)
    callbacks = [checkpoints, TimeToGo(), RichProgressBar()]
    trainer = instantiate(
        cfg.trainer,
        logger=loggers,
        callbacks=callbacks,
        enable_checkpointing=False,
        plugins=[LightningEnvironment()],  # within a scheduler's job too, this process starts the others itself
        # The kind of device that the models are on: they may have been put on a CPU, and Apple's has no float64.
        **({"accelerator": pair.draft_lm.device.type} if cfg.trainer.accelerator == "auto" else {}),
    )
    checkpoints.made_of = decisive_settings(cfg, specs, share, trainer.world_size)
    check_named_checkpoint(cfg.resume, checkpoints.made_of, but="data")  # known once it is there, which may take hours
    folder = data_cache(cfg, pair)
    checkpoints.made_of["data"] = folder.name
    module = HeadModule(HeadBank(specs, cfg.seed), pair.draft_lm, optimizer, pair.target_lm)
    learnt = {"train": labels, "dev": labels, "test": ["sampled"]}  # what test prompts are asked needs no rollouts
    mixing, rounds = (judges, share, cfg.seed), bool(module.bank.needs & set(ROUND_INPUTS))
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
    data = HeadData(splits, **cfg.loader, seed=cfg.seed)
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
    exported = export(module, data, pair.draft_lm.device, run, facts | {"seconds": round(checkpoints.seconds, 1)})
    folders = [run / "heads" / spec.name for spec in specs]
    report(module, exported, calibrate(cfg, pair, folders) if cfg.calibration else {})
    return exported


def decisive_settings(cfg: DictConfig, specs: Sequence[HeadSpec], response_share: float, num_processes: int) -> dict[str, Any]:
    """Return what decides the numbers of a training, beside its data: a run goes on only where none of it has changed."""
    trainer = {key: str(value) for key, value in OmegaConf.to_container(cfg.trainer).items() if key not in WHERE_TO_TRAIN}
    return {
        "head": json.dumps([asdict(spec) for spec in specs], sort_keys=True),
        "seed": cfg.seed,
        "train_share": cfg.train_share,
        "mixing.response_share": response_share,
        "loader.batch_size": cfg.loader.batch_size,
        "devices": num_processes,
        **{f"optimizer.{key}": value for key, value in asdict(instantiate(cfg.optimizer)).items()},
        **{f"trainer.{key}": value for key, value in trainer.items()},
    }


def checkpoint_to_resume(resume: bool | str, checkpoints: Checkpoints) -> Path | None:
    """Return the checkpoint to go on from: that of this folder's interrupted run, or the one that `resume` names."""
    path = checkpoints.path
    if path.is_file() and is_resumed(path.parents[1]):
        try:
            changed = differences(path, checkpoints.made_of)
            if not changed:
                return path
            logger.warning("starts anew: since %s was written, there are other %s", path, ", ".join(changed))
        except UserError as error:
            logger.warning("starts anew: %s", error)
    check_named_checkpoint(resume, checkpoints.made_of)
    return Path(resume) if isinstance(resume, str) else None


def check_named_checkpoint(resume: bool | str, made_of: Mapping[str, Any], but: str = "") -> None:
    """Raise UserError unless the checkpoint that `resume` names, if it names one, is of the same settings, leaving out `but`."""
    changed = [name for name in differences(Path(resume), made_of) if name != but] if isinstance(resume, str) else []
    if changed:
        raise UserError(
            f"resume={resume} is of a run with other {', '.join(changed)}; give the same settings as that run had, "
            "or resume=false to start anew."
        )


def head_specs(cfg: DictConfig, pair: Pair | None) -> list[HeadSpec]:
    """Return every head that the config describes, for this pair: where a setting is a list of values, each combination.

    Without a pair the heads have sizes of 1, to be checked before models are loaded.
    """
    of_pair = {"hidden_size": 1, "embedding_size": 1}
    if pair is not None:
        of_pair = {
            "hidden_size": pair.draft_lm.hidden_size,
            "embedding_size": pair.draft.get_input_embeddings().weight.shape[1],
            "draft": {"id": pair.draft_id, "revision": pair.draft_revision},
            "target": {"id": pair.target_id, "revision": pair.target_revision},
        }
    target_size = 1 if pair is None else pair.target_lm.hidden_size
    if not isinstance(cfg.head.inputs, ListConfig):
        raise UserError(
            f"head.inputs={cfg.head.inputs} is no list; write for example 'head.inputs=[hidden]', or [] for the usual ones."
        )
    if not isinstance(cfg.head.judges, str):
        raise UserError(f"head.judges={cfg.head.judges} is not one value; heads of one run share it. Use -m for several runs.")
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
            judges=cfg.head.judges,
            inputs=tuple(own["head.inputs"]),
            label=own["head.label"],
            warp=OmegaConf.to_container(cfg.warp),
            **of_pair,
        )
        weights = {key.removeprefix("loss."): value for key, value in own.items() if key.startswith("loss.")}
        spec = HeadSpec("", config, **weights)
        if spec.survival_weighted and config.label not in ROLLOUT_LABELS:
            raise UserError(
                f"loss.survival_weighted=true changes nothing with head.label={config.label}, which has no rounds; use it with "
                f"{' or '.join(ROLLOUT_LABELS)}."
            )
        tags = {
            "head.width": f"w{config.width}",
            "loss.accept_weight": f"a{spec.accept_weight:g}",
            "loss.survival_weighted": "survival" if spec.survival_weighted else "even",
            "head.label": config.label,
            "head.inputs": "+".join(config.inputs),
        }
        more = [tag for key, tag in tags.items() if len(choices[key]) > 1]
        name = "-".join([config.judges, f"d{config.depth}", f"r{spec.reject_weight:g}", *more]).replace(".", "_")
        specs.append(replace(spec, name=name))
    if len({spec.name for spec in specs}) < len(specs):
        raise UserError("the same head is asked for twice; give each value of each setting once.")
    return specs


def _choices(value: Any) -> list[Any]:
    return list(value) if isinstance(value, ListConfig) else [value]


def export(module: HeadModule, data: HeadData, draft_device: torch.device, run: Path, trained: Mapping[str, Any]) -> Path:
    """Write every head of the bank as a folder of its own, with what they were `trained` on; return that of the only one, or the one
    above of several.
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
        head.config = replace(head.config, train=facts)
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
        print(f"\n{'in rounds on dev prompts':<28}{'ECE':>8}{'calibrated':>12}")
    for name, own in errors.items():
        print(f"{name:<28}{own['raw']:8.3f}{own['calibrated']:12.3f}")
    print(f"\n{'head' if len(module.bank.specs) == 1 else 'heads'}: {folder}")


@command("train")
def main(cfg: DictConfig) -> None:
    folder = train(cfg)
    if is_first_process():
        print(f"next: {next_command('evaluate.py', f'head={folder}')}")


if __name__ == "__main__":
    main()
