"""Training heads: one pass over the draft's states for all of them, and the folders that they are
exported to.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger

from specheads.errors import UserError
from specheads.heads.batch import collate
from specheads.heads.head import NUM_GOLDEN, save_head
from specheads.heads.train_prompts import TrainPrompts
from specheads.interrupts import deferred
from specheads.pair.needs import memory_of, memory_parts
from specheads.pair.pair import Pair
from specheads.prompts.prompt import SPLITS, GeneratedData
from specheads.replay.information import Information
from specheads.replay.recording import Recorder
from specheads.replay.response_tree import RecordSettings
from specheads.storage.data_set import load_split
from specheads.storage.files import write_json
from specheads.training.heads.bank import HeadBank
from specheads.training.heads.calibrate import Calibrated, calibrate
from specheads.training.heads.head_module import HeadModule
from specheads.training.heads.mixed_responses import FeatureStore, MixedResponses
from specheads.training.heads.settings import HeadTraining
from specheads.training.loaders import ResumableData
from specheads.training.trainer import FSDP2, checkpoint_to_resume, new_trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedHeads:
    """Heads that were trained together, in `folder`: the head, or the folders of the heads `names`.

    `test` has metrics on test prompts by name, also of rules without a head; `calibrated` and
    `information` are on dev prompts.
    """

    folder: Path
    names: Sequence[str]
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    calibrated: dict[str, Calibrated] = field(default_factory=dict)
    information: Information | None = None


def train_heads(
    pair: Pair,
    data: GeneratedData | Callable[[], GeneratedData],
    settings: HeadTraining,
    run: Path,
    loggers: Sequence[Logger] = (),
) -> TrainedHeads:
    """Train heads on the pair's draft, calibrate them where that helps and export them to
    `run`/heads.

    An unfinished training in `run` is resumed. A function that makes the data is called once the
    settings have been checked. `loggers` get the curves. Raises UserError for a data set without
    one of the splits, and for heads that learned nothing.
    """
    run = Path(run)
    if settings.trainer.other("strategy") == FSDP2:
        raise UserError(
            f"trainer.strategy={FSDP2} spreads the weights of a draft over processes, and heads are"
            " small; leave it out, or use specheads distill."
        )
    settings = settings.for_pair(pair)
    kinds = settings.kinds()
    made = cache(data) if callable(data) else lambda: data
    results = dict[str, dict[str, float]]()
    names = list[str]()
    is_first = True
    for kind in kinds:
        specs, found, is_first = _train_kind(
            pair, made, kind, run, loggers, "last" if len(kinds) == 1 else kind.heads
        )
        names += specs
        for (
            name,
            metrics,
        ) in found.items():  # rules without a head are measured on each kind's texts
            results[name if name in specs or len(kinds) == 1 else f"{name}, {kind.heads}"] = metrics
    if not is_first:
        return TrainedHeads(run, names)  # the first process of a distributed run writes the files
    write_json(run / "test.json", results)
    folder = run / "heads" / (names[0] if len(names) == 1 else "")
    if settings.calibration is None:
        return TrainedHeads(folder, names, results)
    limits = made().limits
    parent = made().folder.parent
    recorder = Recorder(pair, settings.warp, limits, RecordSettings(), settings.seed, parent)
    calibrated, known = calibrate(
        settings.calibration, recorder, made().prompts, [run / "heads" / name for name in names]
    )
    return TrainedHeads(folder, names, results, calibrated, known)


def _train_kind(
    pair: Pair,
    data: Callable[[], GeneratedData],
    settings: HeadTraining,
    run: Path,
    loggers: Sequence[Logger],
    checkpoint: str,
) -> tuple[list[str], dict[str, dict[str, float]], bool]:
    """Train and export the heads of one kind.

    Return their names, the metrics on test prompts, and whether files were written.
    """
    specs = settings.specs(pair)
    provenance = {
        "head": json.dumps([asdict(spec) for spec in specs], sort_keys=True)
    } | settings.cache_key()
    trainer, checkpoints = new_trainer(
        settings, run, loggers, pair.draft_lm.device.type, provenance, checkpoint
    )
    folder = data().folder
    checkpoints.provenance["data"] = folder.name
    module = HeadModule(HeadBank(specs, settings.seed), pair.draft_lm, settings.optimizer)
    loaders = _loaders(folder, settings, pair, module)
    train = load_split(folder, "train")
    counts = {"num_prompts": len(set(train["prompt_id"][:])), "num_responses": len(train)}
    earlier = checkpoint_to_resume(checkpoints)
    names = [spec.name for spec in specs]
    with deferred() as checkpoints.request:
        logger.info(
            "training %s: %d responses to %d train prompts, %d epochs, %s, into %s%s, %s",
            names[0] if len(names) == 1 else f"{len(names)} heads",
            counts["num_responses"],
            counts["num_prompts"],
            trainer.max_epochs,
            "each on texts mixed anew" if settings.response_share < 1 else "all on the same texts",
            run,
            f", resumed from {earlier}" if earlier else "",
            memory_of(
                "training", pair.draft_lm, memory_parts(pair.draft_lm)
            ),  # it reads the test texts
        )
        trainer.fit(module, loaders, ckpt_path=earlier)
        trainer.test(module, loaders, verbose=False)
    if trainer.is_global_zero:
        trained = counts | {"seconds": round(checkpoints.seconds, 1)}
        _export(module, loaders, run, trained, TrainPrompts.of(train["prompt"][:]))
    return names, module.test_results, trainer.is_global_zero


def _loaders(folder: Path, settings: HeadTraining, pair: Pair, module: HeadModule) -> ResumableData:
    """Return the loaders of all splits of a data set.

    The draft's states are stored first if the settings ask for it.
    """
    mixing = settings.predicts, settings.response_share, settings.seed
    splits: dict[str, Any] = {
        split: MixedResponses(load_split(folder, split), *mixing) for split in SPLITS
    }
    if settings.response_share == 1:  # mixed texts differ from epoch to epoch
        read = {split: splits[split] for split in ("train", "dev")}  # these are read in every epoch
        splits |= FeatureStore(folder, pair.draft_lm, read, module.bank.needs).stored(
            settings.features_budget
        )
    return ResumableData(splits, **settings.loader.values(), seed=settings.seed, collate=collate)


def _export(
    module: HeadModule,
    loaders: ResumableData,
    run: Path,
    trained: Mapping[str, Any],
    learned: TrainPrompts,
) -> None:
    """Write every head, how it was `trained` and on which prompts.

    Raises UserError for one whose predictions do not vary.
    """
    device = module.lm.device
    module.to(device)  # Lightning leaves the heads on the CPU
    with torch.no_grad():
        features = module.features(next(iter(loaders.loader("dev", shared=False))).to(device))
    module.check_not_constant(features)
    heads = module.bank.heads
    for spec in module.bank.specs:
        head = heads[spec.name]
        provenance = {
            "optimizer": module.optimizer.values(),
            "reject_weight": spec.reject_weight,
            **trained,
            "test": module.test_results[spec.name],
            "kl": module.divergences[spec.name],
        }
        head.config = replace(head.config, train=provenance)
        head.train_prompts = learned
        inputs = head.assemble({name: value[:NUM_GOLDEN] for name, value in features.items()})
        save_head(head, run / "heads" / spec.name, inputs)
