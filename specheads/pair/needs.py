"""What a pair is and needs, said before anything of it is loaded: its models and the memory of their weights."""

from contextlib import suppress
from typing import NamedTuple

from specheads.errors import UserError
from specheads.pair.config import ModelSource, PairConfig
from specheads.pair.language_model import short_name, weightless_model
from specheads.pair.quantization import QUANTIZATIONS
from specheads.pair.revisions import EMBEDDED


class _StoredWeights(NamedTuple):
    """The weights of a model: their number, bytes and type."""

    number: int
    num_bytes: float
    dtype: str


def pair_needs(config: PairConfig, only_draft: bool = False) -> list[str]:
    """Return lines about a pair for its user: models and memory; none for an embedded pair.

    Sizes are those of the models' configs, where these can be read. With `only_draft` the target's weights are not loaded.
    """
    if str(config.target).startswith(EMBEDDED) or not config.target:
        return []
    models, loaded = [], list[_StoredWeights | None]()
    for role in ("draft", "target") if config.draft else ("target",):
        source = config.source(role)
        weights = _weights_of(source)
        number = f" ({amount(weights.number, 'billion', 'million')} parameters)" if weights else ""
        models.append(f"{role} {source.location}{number}")
        loaded += [] if only_draft and role == "target" else [weights]
    lines = [f"pair {config.name or 'without a name'}: {' for '.join(models)}"]
    if loaded and (known := [each for each in loaded if each]) == loaded:
        sizes = [amount(each.num_bytes, "GB", "MB") for each in known]
        parts = f" ({' + '.join(sizes)})" if len(sizes) > 1 else ""
        lines.append(
            f"it needs {amount(sum(each.num_bytes for each in known), 'GB', 'MB')} of memory{parts} for weights in "
            f"{' and '.join(dict.fromkeys(each.dtype for each in known))}, and more for the keys and values of texts"
        )
    return lines


def _weights_of(source: ModelSource) -> _StoredWeights | None:
    """Return the weights of a model; None where its config cannot be read yet: loading it says why, in a moment."""
    with suppress(UserError):
        model = weightless_model(source)
        number, per_weight, stored = model.num_parameters(), float(model.dtype.itemsize), short_name(model.dtype)
        if source.quantization:
            per_weight, stored = QUANTIZATIONS[source.quantization].num_bytes, source.quantization
        return _StoredWeights(number, number * per_weight, stored)
    return None


def amount(number: float, billions: str, millions: str) -> str:
    """Return a number with three digits in one of two units, "6.74 billion" or "53.3 MB"."""
    return f"{number / 1e9:.3g} {billions}" if number >= 1e9 else f"{number / 1e6:.3g} {millions}"
