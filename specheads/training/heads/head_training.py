"""Training heads: one pass over the draft's states for all of them, and the folders that they are exported to."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specheads.errors import UserError
from specheads.evaluation.report import Information
from specheads.heads.batch import collate
from specheads.heads.head import NUM_GOLDEN, save_head
from specheads.heads.train_prompts import TrainPrompts
from specheads.interrupts import deferred
from specheads.pair.needs import memory_of, memory_parts
from specheads.pair.pair import Pair
from specheads.prompts.prompt import SPLITS, GeneratedData
from specheads.replay.recording import Recorder
from specheads.replay.response_tree import RecordSettings
from specheads.storage.data_set import load_split
from specheads.storage.files import write_json
from specheads.training.heads.bank import HeadBank
from specheads.training.heads.calibrate import Calibrated, calibrate
from specheads.training.heads.feature_store import FeatureStore
from specheads.training.heads.head_module import HeadModule
from specheads.training.heads.mixed_responses import MixedResponses
from specheads.training.heads.settings import HeadTraining
from specheads.training.loaders import ResumableData
from specheads.training.trainer import FSDP2, checkpoint_to_resume, new_trainer

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedHeads:
    """Heads that were trained together.

    `folder` holds the head, or the folders of the heads `names`. `test` has the metrics on test prompts by name, also those of
    rules without a head. Heads that were compared on dev prompts have a calibration, or do better without one, in `calibrated`,
    and `information` is what they know about acceptance there.
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
    loggers: Sequence["Logger"] = (),
) -> TrainedHeads:
    """Train heads on the pair's draft, all in one pass over its states, calibrate them and export them to `run`/heads.

    Args:
        data: the data set, or a function that generates it, which is called once the settings have been checked.
        run: the folder of the run, which holds its checkpoints; an unfinished training in it is resumed.
        loggers: Lightning loggers for the metrics.

    Raises:
        UserError: a data set without one of the splits, heads that learned nothing.
    """
    run = Path(run)
    if settings.trainer.other("strategy") == FSDP2:
        raise UserError(
            f"trainer.strategy={FSDP2} spreads the weights of a draft over processes, and heads are small; leave it out, or use "
            "specheads distill."
        )
    settings = settings.for_pair(pair)
    specs = settings.specs(pair)
    provenance = {"head": json.dumps([asdict(spec) for spec in specs], sort_keys=True)} | settings.cache_key()
    trainer, checkpoints = new_trainer(settings, run, loggers, pair.draft_lm.device.type, provenance)
    data = data() if callable(data) else data
    checkpoints.provenance["data"] = data.folder.name
    module = HeadModule(HeadBank(specs, settings.seed), pair.draft_lm, settings.optimizer)
    loaders = _loaders(data.folder, settings, pair, module)
    train = load_split(data.folder, "train")
    counts = {"num_prompts": len(set(train["prompt_id"][:])), "num_responses": len(train)}
    earlier, names = checkpoint_to_resume(checkpoints), [spec.name for spec in specs]
    with deferred() as checkpoints.request:
        logger.info(
            "training %s: %d responses to %d train prompts, %d epochs, into %s%s, %s",
            names[0] if len(names) == 1 else f"{len(names)} heads",
            counts["num_responses"],
            counts["num_prompts"],
            trainer.max_epochs,
            run,
            f", resumed from {earlier}" if earlier else "",
            memory_of("training", pair.draft_lm, memory_parts(pair.draft_lm)),  # it reads the test texts
        )
        trainer.fit(module, loaders, ckpt_path=earlier)
        trainer.test(module, loaders, verbose=False)
    if not trainer.is_global_zero:
        return TrainedHeads(run, names)  # the first process of a distributed run writes the files
    trained, learned = counts | {"seconds": round(checkpoints.seconds, 1)}, TrainPrompts.of(train["prompt"][:])
    folder = _export(module, loaders, pair.draft_lm.device, run, trained, learned)
    if settings.calibration is None:
        return TrainedHeads(folder, names, module.test_results)
    recorder = Recorder(pair, settings.warp, data.limits, RecordSettings(), settings.seed, data.folder.parent)
    calibrated, known = calibrate(settings.calibration, recorder, data.prompts, [run / "heads" / name for name in names])
    return TrainedHeads(folder, names, module.test_results, calibrated, known)


def _loaders(folder: Path, settings: HeadTraining, pair: Pair, module: HeadModule) -> ResumableData:
    """Return the loaders of all splits of a data set; the draft's states are stored first if the settings ask for it."""
    mixing = settings.head.predicts, settings.response_share, settings.seed
    splits: dict[str, Any] = {split: MixedResponses(load_split(folder, split), *mixing) for split in SPLITS}
    if not splits["train"].mixes:  # mixed texts differ from epoch to epoch
        read = {split: splits[split] for split in ("train", "dev")}  # these are read in every epoch
        splits |= FeatureStore(folder, pair.draft_lm, read, module.bank.needs).stored(settings.features_budget)
    return ResumableData(splits, **settings.loader.values(), seed=settings.seed, collate=collate)


def _export(
    module: HeadModule,
    loaders: ResumableData,
    draft_device: torch.device,
    run: Path,
    trained: Mapping[str, Any],
    learned: TrainPrompts,
) -> Path:
    """Write every head of the bank into a separate folder; return the folder of a single head, or the parent of several.

    Args:
        trained: how they were trained, for their configs.
        learned: the prompts that they were trained on.

    Raises:
        UserError: a head whose predictions do not vary.
    """
    module.to(draft_device)  # Lightning leaves the heads on the CPU
    with torch.no_grad():
        features = module.features(next(iter(loaders.loader("dev", shared=False))).to(draft_device))
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
        head.config, head.train_prompts = replace(head.config, train=provenance), learned
        inputs = head.assemble({name: value[:NUM_GOLDEN] for name, value in features.items()})
        folder = save_head(head, run / "heads" / spec.name, inputs)
    write_json(run / "test.json", module.test_results)
    return folder if len(heads) == 1 else folder.parent
