"""Adaptive speculative decoding in `generate`, as transformers loads it from a folder.

    target.generate(
        **inputs,
        custom_generate="<folder or hub id>",
        trust_remote_code=True,
        draft_model=draft,
    )

`draft_model` is the model that the head in the folder was trained for; where the hub's commits of
both are known, they must be equal, unless `any_draft=True`. `threshold`, `min_tokens` and
`max_tokens` change when drafts end; `revision` belongs to a hub id. All other arguments are passed
to `generate`.
"""

import copy
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from specheads.heads.portable.assisted import Assisted
from specheads.heads.portable.standalone_head import Bounds, StandaloneHead

_LOADED: dict[
    tuple[str, tuple[int, int, int, int], str], StandaloneHead
] = {}  # by folder, the time its weights were written, and device


def generate(
    model: PreTrainedModel,
    draft_model: PreTrainedModel | None = None,
    threshold: float | None = None,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    any_draft: bool = False,
    revision: str | None = None,
    assistant_model: PreTrainedModel | None = None,
    **arguments: object,
) -> Tensor | ModelOutput:
    """Return what `model.generate` returns.

    Raises ValueError without a draft model, or for a head that does not fit it.
    """
    draft_model = assistant_model if draft_model is None else draft_model
    if draft_model is None:
        raise ValueError(
            "draft_model= is missing: give the draft that the head was trained for, as its"
            " config.json names it."
        )
    # transformers does not pass on the folder or hub id that it loaded this code from, which is
    # where the head lies.
    location = sys._getframe(1).f_locals["custom_generate"]
    head = _head(str(location), draft_model, revision)
    trained = (head.config.get("draft") or {}).get("commit")
    present = getattr(draft_model.config, "_commit_hash", None)
    if not any_draft and trained and present and trained != present:
        raise ValueError(
            f"the head was trained for {head.config['draft'].get('id')} at commit {trained}, but"
            f" the draft is {draft_model.name_or_path} at {present}; load that one, or give"
            " any_draft=True."
        )
    bounds: Bounds = {
        "threshold": threshold,
        "min_tokens": min_tokens,
        "max_tokens": max_tokens,
    }
    target = copy.copy(model)  # other threads may generate by the model itself
    with Assisted(target, draft_model, head, **bounds):
        return target.generate(assistant_model=draft_model, **arguments)


def _head(location: str, draft: PreTrainedModel, revision: str | None) -> StandaloneHead:
    folder = Path(location)
    if not folder.is_dir():
        files = ["config.json", "model.safetensors", "golden.safetensors"]
        folder = Path(snapshot_download(location, revision=revision, allow_patterns=files))
    device = draft.get_input_embeddings().weight.device
    status = (folder / "model.safetensors").stat()
    changes = status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
    key = str(folder.resolve()), changes, str(device)
    if key not in _LOADED:
        _LOADED[key] = StandaloneHead.load(folder).to(device)
    return _LOADED[key]
