"""Training heads: one pass over the draft's states for all of them, and the folders that they are
exported to.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from lightning import Trainer
from lightning.pytorch.loggers import Logger

from specheads.decoding.stopping import MAX_TOKENS
from specheads.heads.batch import HeadBatch, collate
from specheads.heads.head import NUM_GOLDEN, save_head
from specheads.heads.train_prompts import TrainPrompts
from specheads.interrupts import deferred
from specheads.pair.needs import memory_of, memory_to_read
from specheads.pair.pair import Pair
from specheads.progress import stage
from specheads.prompts.prompt import SPLITS, GeneratedData, encode_prompts
from specheads.replay.calibration import Calibrated
from specheads.replay.information import Information
from specheads.replay.recording import Recorder
from specheads.replay.response_tree import RecordSettings
from specheads.storage.data_set import load_split
from specheads.storage.files import write_json
from specheads.training.heads.bank import HeadBank
from specheads.training.heads.calibrate import calibrate
from specheads.training.heads.head_module import HeadModule
from specheads.training.heads.mixed_responses import FeatureStore, MixedResponses
from specheads.training.heads.settings import TITLES, HeadTraining
from specheads.training.loaders import ResumableData
from specheads.training.trainer import Best, checkpoint_to_resume, new_trainer

logger = logging.getLogger(__name__)


class DevLoss(NamedTuple):
    """A head's loss on dev prompts: after the epoch whose weights are exported, counted from 0,
    after the last, and of the best prediction that is the same everywhere.
    """

    epoch: int
    best: float
    last: float
    constant: float


@dataclass(frozen=True)
class TrainedHeads:
    """Heads that were trained together, in `folder`: the head, or the folders of the heads `names`.

    `test` has each head's metrics on test prompts; `dev`, `calibrated` and `information` are on dev
    prompts.
    """

    folder: Path
    names: Sequence[str]
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    calibrated: dict[str, Calibrated] = field(default_factory=dict)
    information: Information | None = None
    dev: dict[str, DevLoss] = field(default_factory=dict)


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
    pair.check_merged()
    run = Path(run)
    settings = settings.for_pair(pair)
    kinds = settings.kinds()
    made = cache(data) if callable(data) else lambda: data
    results: dict[str, dict[str, float]] = {}
    dev: dict[str, DevLoss] = {}
    names: list[str] = []
    is_first = True  # whether this is the first process of a distributed run, which writes files
    for kind in kinds:
        checkpoint = "last" if len(kinds) == 1 else kind.heads
        trainer, module, of_kind = _train_kind(pair, made, kind, run, loggers, checkpoint)
        dev |= of_kind
        is_first = trainer.is_global_zero
        names += [spec.name for spec in module.bank.specs]
        results |= module.test_results
    if not is_first:
        return TrainedHeads(run, names)
    write_json(run / "test.json", results)
    folder = run / "heads" / (names[0] if len(names) == 1 else "")
    if settings.calibration is None:
        return TrainedHeads(folder, names, results, dev=dev)
    generated = made()
    dev_prompts = [prompt for prompt in generated.prompts if prompt.split == "dev"]
    recorder = Recorder(
        pair,
        settings.warp,
        generated.limits,
        RecordSettings(),
        settings.seed,
        generated.folder.parent,
    )
    with stage("calibration") as say:
        calibrated, known = calibrate(
            settings.calibration,
            recorder,
            encode_prompts(pair, dev_prompts, generated.limits),
            [run / "heads" / name for name in names],
        )
        num_used = sum(each.used for each in calibrated.values())
        say(f"on dev prompts: it helps {num_used} of {len(names)} heads")
    return TrainedHeads(folder, names, results, calibrated, known, dev)


def _train_kind(
    pair: Pair,
    made: Callable[[], GeneratedData],
    settings: HeadTraining,
    run: Path,
    loggers: Sequence[Logger],
    checkpoint: str,
) -> tuple[Trainer, HeadModule, dict[str, DevLoss]]:
    """Train and export the heads of one kind; return what trained them, their module, and their
    losses on dev prompts.
    """
    draft = pair.draft_lm
    specs = settings.specs(pair)
    described = json.dumps([asdict(spec) for spec in specs], sort_keys=True)
    provenance = {"head": described} | settings.cache_key()
    trainer, checkpoints = new_trainer(
        settings, run, loggers, draft.device.type, provenance, checkpoint
    )
    folder = made().folder
    checkpoints.provenance["data"] = folder.name
    module = HeadModule(HeadBank(specs, settings.seed), pair, settings.optimizer)
    data = _data(folder, settings, pair, module.bank.needs)
    train = load_split(folder, "train")
    counts = {"num_prompts": len(set(train["prompt_id"][:])), "num_responses": len(train)}
    earlier = checkpoint_to_resume(checkpoints)
    with deferred() as checkpoints.request, stage("heads") as say:
        logger.info(
            "training %s: %d responses to %d train prompts, into %s%s, %s",
            specs[0].name if len(specs) == 1 else f"{len(specs)} heads",
            counts["num_responses"],
            counts["num_prompts"],
            run,
            f", resumed from {earlier}" if earlier else "",
            # The test texts are read
            memory_of("training", draft, *memory_to_read(pair.target_lm, draft, MAX_TOKENS + 1)),
        )
        trainer.fit(module, data, ckpt_path=earlier)
        module.load_weights(checkpoints.read_best(trainer))
        trainer.test(module, data, verbose=False)
        title = TITLES[settings.heads]
        of_kind = title if len(specs) == 1 else f"{len(specs)} {title}s"
        epochs = f"{trainer.current_epoch} epochs"
        if len(specs) == 1 and checkpoints.best:
            (best,) = checkpoints.best.values()
            epochs = f"the best after epoch {best.epoch + 1} of {trainer.current_epoch}"
        say(f"{of_kind}, {epochs}")
    if trainer.is_global_zero:
        trained = counts | {"seconds": round(checkpoints.seconds, 1)}
        _export(module, data, run / "heads", trained, TrainPrompts.of(train["prompt"][:]))
    return trainer, module, _dev_losses(module, checkpoints.best)


def _dev_losses(module: HeadModule, best: Mapping[str, Best]) -> dict[str, DevLoss]:
    losses = {}
    for name, found in best.items():
        last = module.last_dev_loss(name)
        losses[name] = DevLoss(found.epoch, found.value, last, module.constant_losses[name])
    return losses


def _data(
    folder: Path, settings: HeadTraining, pair: Pair, needs: frozenset[str]
) -> ResumableData[HeadBatch]:
    """Return the batches of all splits of a data set.

    The draft's states are stored first if the settings ask for it.
    """
    splits: dict[str, MixedResponses] = {}
    for split in SPLITS:
        rows = load_split(folder, split)
        share = settings.response_share
        num_mixes = settings.num_mixes if split == "train" else 1
        splits[split] = MixedResponses(rows, settings.predicts, share, settings.seed, num_mixes)
    read_in_every_epoch = {split: splits[split] for split in ("train", "dev")}
    FeatureStore(folder, pair, read_in_every_epoch, needs).store(settings.features_budget)
    return ResumableData(splits, settings.loader.batch_size, settings.seed, collate)


def _export(
    module: HeadModule,
    data: ResumableData[HeadBatch],
    folder: Path,
    trained: Mapping[str, float],
    learned: TrainPrompts,
) -> None:
    """Write every head, how it was `trained` and on which prompts.

    Raises UserError for one whose predictions do not vary.
    """
    device = module.pair.draft_lm.device
    module.to(device)  # Lightning leaves the heads on the CPU
    with torch.no_grad():
        features = module.features(next(iter(data.batches("dev", shared=False))).to(device))
    module.check_not_constant(features)
    heads = module.bank.heads
    for spec in module.bank.specs:
        head = heads[spec.name]
        provenance = {
            "optimizer": module.optimizer.values(),
            "reject_weight": spec.reject_weight,
            **trained,
            "test": module.test_results[spec.name],
        }
        head.config = replace(head.config, train=provenance)
        head.train_prompts = learned
        inputs = head.assemble({name: value[:NUM_GOLDEN] for name, value in features.items()})
        save_head(head, folder / spec.name, inputs)
