"""Load and save heads, and find the newest one."""

from pathlib import Path
from typing import Any

from torch import Tensor

from specheads.errors import UserError
from specheads.heads.config import HeadConfig
from specheads.heads.head import AcceptanceHead
from specheads.pair import Pair
from specheads.storage.files import read_json
from specheads.storage.runs import has_ended


def save_head(head: AcceptanceHead, folder: Path, golden_inputs: Tensor | None = None) -> Path:
    """Write a head to `folder`, which is made, or whose files are replaced one by one; return the folder.

    `golden_inputs` are assembled inputs (N, input_size) of real tokens; by default those that the head was loaded with, or random
    inputs of its scale.
    """
    return head.write(folder, golden_inputs)


def load_head(location: str | Path, any_draft: bool = False, **hub: Any) -> AcceptanceHead:
    """Load a head from a folder or hub id, on the CPU in float32; the SpecDec++ authors' checkpoints are read, too.

    Args:
        location: a folder or hub id.
        any_draft: whether to forget for which draft and target the head was trained, so that it decodes with any draft of its
            size, for example one that was distilled a little further. Its predictions are then less accurate.
        hub: arguments of huggingface_hub's snapshot_download, such as `revision` and `token`.

    Raises:
        UserError: no such folder or hub id; a tensor that is missing, extra or of another shape; golden logits that the head does
            not compute.
    """
    return AcceptanceHead.from_pretrained(location, any_draft=any_draft, **hub)


def latest_head(outputs: Path, pair: Pair) -> Path:
    """Return the newest head folder `**/heads/<name>` under `outputs` that a finished run trained for the pair.

    Raises:
        UserError: there is none.
    """
    configs = sorted(outputs.glob("**/heads/*/config.json"), key=_trained_at, reverse=True)
    revisions = {"draft": pair.draft_revision, "target": pair.target_revision}
    for path in configs:
        if not has_ended(path, outputs):
            continue  # it may yet be calibrated, or be the first of a learning curve
        try:
            config = HeadConfig.from_dict(read_json(path), str(path))
        except (ValueError, OSError):
            continue  # a folder that was never finished, or was damaged, is no candidate
        if all(getattr(config, role).get("revision") == revision for role, revision in revisions.items()):
            return path.parent
    others = f" ({len(configs)} for other pairs)" if configs else ""
    raise UserError(
        f"there is no head for draft {pair.draft_id} with target {pair.target_id} under {outputs}{others}; "
        f"train one with specheads train model={pair.name}."
    )


def _trained_at(config: Path) -> float:
    """Return when a head's weights were written; an evaluation may have written into its config since."""
    weights = config.with_name("model.safetensors")
    return (weights if weights.exists() else config).stat().st_mtime
