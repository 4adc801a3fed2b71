"""A head that `specheads export` names: checked and described, or written for another decoder."""

from collections.abc import Mapping
from pathlib import Path

from specheads.errors import UserError
from specheads.heads.card import properties, recommendation
from specheads.heads.head import load_head
from specheads.integrations.formats import FORMATS


def written(location: str, name: str) -> Path:
    """Write the head of a local folder in a format; return the file's path.

    Raises UserError for a damaged head, and for one that is not in a folder of this project.
    """
    head = load_head(location)
    folder = Path(location)
    if not folder.is_dir():
        raise UserError(
            f"head={location} is on the hub, and files are written into a local folder; give one."
        )
    if head.golden_inputs is None:
        raise UserError(
            f"head={location} is a checkpoint of the SpecDec++ authors; convert it first:"
            f" specheads.load_head('{location}').save_pretrained('my-head')"
        )
    return FORMATS[name](head, folder)


def described(location: str) -> str:
    """Return the lines about the head of a folder or hub id. Raises UserError for a damaged one."""
    head = load_head(location)
    config = head.config
    learned = head.train_prompts
    rows = properties(config) | {
        "parameters": f"{sum(weight.numel() for weight in head.parameters()):,}",
        "prompts": "not known",
        "recommended": recommendation(config)
        or "nothing yet; specheads evaluate chooses a threshold",
        "held out": _listed(config.train.get("test") or {}) or "not known",
        "files": "unchanged since its export",
    }
    if learned is not None:
        rows["prompts"] = (
            f"trained on {len(learned.train):,}, calibrated on {len(learned.dev):,}; evaluations do"
            " not report on them"
        )
    if head.golden_inputs is None:
        rows["files"] = (
            "a complete checkpoint of the SpecDec++ authors; it names no draft and has no golden"
            " vectors to check"
        )
    return "\n".join(f"{name:<15} {value}" for name, value in rows.items())


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
    )
