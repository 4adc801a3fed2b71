"""What a pair is and needs, said before anything of it is loaded: its models, the memory of their weights, access on the hub."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specheads.errors import UserError
from specheads.language_model import checked_device, checked_dtype, short_name, weightless_model
from specheads.pair_config import PairConfig
from specheads.published_models import PUBLISHED
from specheads.quantization import QUANTIZATIONS
from specheads.revisions import EMBEDDED, how_to_access

HALF = 2  # bytes per weight where the type of a checkpoint is not known yet: almost all are stored in 16 bits


@dataclass(frozen=True)
class ModelNeeds:
    """A model that is to be loaded: its role, where it is, its weights and their bytes, None where these are not known yet."""

    role: str
    location: str
    num_parameters: int | None = None
    num_bytes: float | None = None
    dtype: str | None = None

    @property
    def text(self) -> str:
        """The model in words."""
        if self.num_parameters is None:
            return f"{self.role} {self.location}"
        return f"{self.role} {self.location} ({size_text(self.num_parameters)} parameters)"


def pair_needs(config: PairConfig, only_draft: bool = False) -> list[str]:
    """Return lines about a pair for its user: models, memory, access to gated ones; none for an embedded pair.

    With `only_draft` the target's weights are not loaded. Sizes are those of `PUBLISHED`, or of the configs of the models.
    """
    if str(config.target).startswith(EMBEDDED) or not config.target:
        return []
    target = model_needs("target", config)
    models = [model_needs("draft", config), target] if config.draft else [target]
    lines = [f"pair {config.name or 'without a name'}: {' for '.join(model.text for model in models)}"]
    loaded = [model for model in models if not (only_draft and model is target)]
    if memory := _memory_text(loaded):
        lines.append(memory)
    gated = [model.location for model in models if (known := PUBLISHED.get(model.location)) and known.gated]
    licences = dict.fromkeys(PUBLISHED[location].licence for location in gated)
    if gated:
        lines.append(f"gated ({', '.join(licences)}): {how_to_access(gated)}")
    return lines


def model_needs(role: str, config: PairConfig) -> ModelNeeds:
    """Return the needs of the draft or the target of a pair; a model whose config cannot be read yet has those of `PUBLISHED`."""
    is_draft = role == "draft"
    location = str(config.draft if is_draft else config.target)
    known, dtype = PUBLISHED.get(location), checked_dtype(config.dtype)
    num_parameters, per_weight = known.num_parameters if known else None, HALF
    if isinstance(dtype, torch.dtype):
        per_weight = dtype.itemsize
    if num_parameters is None or not isinstance(dtype, torch.dtype):
        revision = config.draft_revision if is_draft else config.target_revision
        device, spread = checked_device(config.device), None if is_draft else config.device_map
        try:
            model = weightless_model(location, revision, dtype, device, spread, config.trusts(role), quiet=True)
        except UserError:  # loading it says why, in a moment
            pass
        else:
            num_parameters, dtype, per_weight = model.num_parameters(), model.dtype, model.dtype.itemsize
    quantization = config.draft_quantization if is_draft else config.quantization
    share = QUANTIZATIONS[quantization].num_bytes if quantization else per_weight
    stored = quantization or (short_name(dtype) if isinstance(dtype, torch.dtype) else None)
    return ModelNeeds(role, location, num_parameters, num_parameters and num_parameters * share, stored)


def size_text(num_parameters: int) -> str:
    """Return a number of parameters with three digits, "6.74 billion"."""
    return f"{num_parameters / 1e9:.3g} billion" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.3g} million"


def memory_text(num_bytes: float) -> str:
    """Return bytes with three digits, "151 GB" or "53.3 MB"."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _memory_text(models: Sequence[ModelNeeds]) -> str | None:
    """Return what the weights of models take; None where their sizes are not known."""
    sizes = [model.num_bytes for model in models if model.num_bytes is not None]
    if len(sizes) < len(models):
        return None
    types = " and ".join(dict.fromkeys(model.dtype or "the type of the checkpoint" for model in models))
    parts = f" ({' + '.join(map(memory_text, sizes))})" if len(sizes) > 1 else ""
    return (
        f"it needs {memory_text(sum(sizes))} of memory{parts} for weights in {types}, and more for the keys and values of texts"
    )
