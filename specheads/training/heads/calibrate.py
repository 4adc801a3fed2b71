"""Calibration of trained heads on dev prompts, which they were not trained on, recorded as an
evaluation records them.
"""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from specheads.errors import UserError
from specheads.heads.calibration import FORMS, IndexCalibration
from specheads.heads.head import AcceptanceHead, load_head
from specheads.heads.head_folder import store_in_config
from specheads.heads.train_prompts import text_hash
from specheads.prompts.prompt import EncodedPrompt, groups_of
from specheads.replay.calibration import Calibrated, compared
from specheads.replay.head_scores import record_sets
from specheads.replay.information import Information, information
from specheads.replay.recording import Recorder
from specheads.replay.replay import head_logits, recorded_head

logger = logging.getLogger(__name__)


def calibrate(
    num_prompts: int, recorder: Recorder, dev: Sequence[EncodedPrompt], folders: Sequence[Path]
) -> tuple[dict[str, Calibrated], Information | None]:
    """Calibrate every head in `folders` on dev prompts where that helps, and write the calibration
    into the head's config.

    It helps if the best form's cross-fitted log loss is lower, with 95 % confidence over groups of
    prompts, and its calibration error too. Return by head what was found, and what the heads
    explain about acceptance on these prompts.
    """
    heads = {folder: load_head(folder) for folder in folders}
    prompts = unknown_prompts(num_prompts, dev, heads.values())
    groups = groups_of(prompt for prompt, _ in prompts)
    texts = [prompt.text for prompt, _ in prompts]
    title = folders[0].name if len(folders) == 1 else f"{len(folders)} heads"
    logger.info("calibrating %s on %d dev prompts", title, len(prompts))
    recording = record_sets(recorder, {"dev": prompts}, list(heads.values()), True)["dev"]
    recorded = {folder.name: recorded_head(head) for folder, head in heads.items()}
    known = information([recording], recorded, groups)
    found: dict[str, Calibrated] = {}
    for folder, head in heads.items():
        logits, tokens = head_logits(recording, recorded[folder.name])
        earlier = None
        if head.config.calibration is not None:
            earlier = IndexCalibration.from_dict(head.config.calibration)
        given = logits, tokens.accepted, tokens.indices
        result = compared(*given, recording.prompt_of(tokens.node), groups, earlier)
        found[folder.name] = result
        if earlier is not None and not result.used:
            continue
        calibration = None
        recommended = head.config.recommended
        if result.used:
            fitted = IndexCalibration.fit(*given, *FORMS[result.best])
            calibration = fitted.to_dict()
            recommended = None  # a threshold for other predictions
        errors = {"dev_ece": dict(result.ece), "dev_log_loss": dict(result.log_loss)}
        store_in_config(
            folder,
            dev_texts=texts,
            calibration=calibration,
            recommended=recommended,
            train=dict(head.config.train) | errors,
        )
    return found, known


def unknown_prompts(
    num_prompts: int, dev: Sequence[EncodedPrompt], heads: Collection[AcceptanceHead]
) -> list[EncodedPrompt]:
    """Return the first `num_prompts` dev prompts that no head learned from.

    Raises UserError if there are none.
    """
    learned: set[int] = set()
    for head in heads:
        if head.train_prompts is not None:
            learned.update(head.train_prompts.train.tolist())
    unknown = []
    for prompt, ids in dev:
        if text_hash(prompt.text) not in learned:
            unknown.append((prompt, ids))
    if not unknown:
        raise UserError(
            "calibration needs dev prompts that heads did not learn from, but there are none among"
            f" {len(dev)}; raise data.num_dev, or leave it out by calibration=null."
        )
    return unknown[:num_prompts]
