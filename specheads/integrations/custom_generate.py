"""Adaptive speculative decoding in `generate`, as transformers loads it from a folder.

    target.generate(**inputs, custom_generate="<folder or hub id>", trust_remote_code=True, draft_model=draft)

`draft_model` is the model that the head in the folder was trained for. All other arguments are those of `generate`; `threshold`, `min_tokens` and
`max_tokens` change when drafts end; `acceptance_head` names another head's folder or hub id.
"""

import sys
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from specheads.integrations.assisted import Assisted
from specheads.integrations.standalone_head import StandaloneHead

_LOADED: dict[tuple[str, float], StandaloneHead] = {}  # by folder and the time its weights were written


def generate(
    model: PreTrainedModel,
    draft_model: PreTrainedModel | None = None,
    acceptance_head: str | None = None,
    threshold: float | None = None,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    assistant_model: PreTrainedModel | None = None,
    **arguments: Any,
) -> Any:
    """Return what `model.generate` returns.

    Raises:
        ValueError: no draft model, or a head that does not fit it.
    """
    draft_model = assistant_model if draft_model is None else draft_model
    if draft_model is None:
        raise ValueError("draft_model= is missing: give the draft that the head was trained for, as its config.json names it.")
    # transformers keeps from us what it was asked to load; it is where the head lies.
    location = acceptance_head or sys._getframe(1).f_locals.get("custom_generate")
    if location is None:
        raise ValueError("where the head lies is not known; give acceptance_head=<folder or hub id>.")
    bounds = {"threshold": threshold, "min_tokens": min_tokens, "max_tokens": max_tokens}
    with Assisted(model, draft_model, _head(str(location)), **bounds):
        return model.generate(assistant_model=draft_model, **arguments)


def _head(location: str) -> StandaloneHead:
    folder = Path(location)
    if not folder.is_dir():
        folder = Path(snapshot_download(location, allow_patterns=["config.json", "*.safetensors"]))
    key = str(folder.resolve()), (folder / "model.safetensors").stat().st_mtime
    if key not in _LOADED:
        _LOADED[key] = StandaloneHead.load(folder)
    return _LOADED[key]
