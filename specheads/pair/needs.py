"""What a pair is and needs, said before anything of it is loaded: its models, the memory of their weights, access on the hub."""

from contextlib import suppress
from typing import NamedTuple

from specheads.errors import UserError
from specheads.pair.config import ModelSource, PairConfig
from specheads.pair.language_model import short_name, weightless_model
from specheads.pair.quantization import QUANTIZATIONS
from specheads.pair.revisions import EMBEDDED, how_to_access

# By the beginning of a model's id the licence that must be accepted on the hub before a download.
GATED = {f"meta-llama/Llama-{version}": f"Llama {version} Community License" for version in ("2", "3.1", "3.2")}


class _Weights(NamedTuple):
    """The weights of a model: their number, bytes and type."""

    number: int
    num_bytes: float
    dtype: str


def pair_needs(config: PairConfig, only_draft: bool = False) -> list[str]:
    """Return lines about a pair for its user: models, memory, access to gated ones; none for an embedded pair.

    Sizes are those of the models' configs, where these can be read. With `only_draft` the target's weights are not loaded.
    """
    if str(config.target).startswith(EMBEDDED) or not config.target:
        return []
    sources = {role: config.source(role) for role in ("draft", "target") if role == "target" or config.draft}
    models, weights = [], [_weights_of(source) for source in sources.values()]
    for (role, source), each in zip(sources.items(), weights, strict=True):
        number = f" ({amount(each.number, 'billion', 'million')} parameters)" if each else ""
        models.append(f"{role} {source.location}{number}")
    lines = [f"pair {config.name or 'without a name'}: {' for '.join(models)}"]
    loaded = weights[:-1] if only_draft else weights
    if loaded and (known := [each for each in loaded if each]) == loaded:
        sizes = [amount(each.num_bytes, "GB", "MB") for each in known]
        parts = f" ({' + '.join(sizes)})" if len(sizes) > 1 else ""
        lines.append(
            f"it needs {amount(sum(each.num_bytes for each in known), 'GB', 'MB')} of memory{parts} for weights in "
            f"{' and '.join(dict.fromkeys(each.dtype for each in known))}, and more for the keys and values of texts"
        )
    gated = {str(source.location): name for source in sources.values() for name in GATED if str(source.location).startswith(name)}
    if gated:
        licences = ", ".join(dict.fromkeys(GATED[name] for name in gated.values()))
        lines.append(f"gated ({licences}): {how_to_access([*gated])}")
    return lines


def _weights_of(source: ModelSource) -> _Weights | None:
    """Return the weights of a model; None where its config cannot be read yet: loading it says why, in a moment."""
    with suppress(UserError):
        model = weightless_model(source)
        number, per_weight, stored = model.num_parameters(), float(model.dtype.itemsize), short_name(model.dtype)
        if source.quantization:
            per_weight, stored = QUANTIZATIONS[source.quantization].num_bytes, source.quantization
        return _Weights(number, number * per_weight, stored)
    return None


def amount(number: float, billions: str, millions: str) -> str:
    """Return a number with three digits in one of two units, "6.74 billion" or "53.3 MB"."""
    return f"{number / 1e9:.3g} {billions}" if number >= 1e9 else f"{number / 1e6:.3g} {millions}"
