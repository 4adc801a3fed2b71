"""The memory of a pair's weights, said before it is loaded."""

from specheads.errors import UserError
from specheads.pair.config import PairConfig
from specheads.pair.language_model import short_name, weightless_model
from specheads.pair.locations import EMBEDDED
from specheads.pair.quantization import QUANTIZATIONS
from specheads.storage.files import amount


def pair_needs(config: PairConfig, only_draft: bool = False) -> list[str]:
    """Return lines about a pair, its models and the memory of weights that are loaded.

    None for an embedded pair.
    """
    if str(config.target).startswith(EMBEDDED) or not config.target:
        return []
    models = []
    sizes = list[float]()
    types = list[str]()
    is_known = True
    for role in ("draft", "target") if config.draft else ("target",):
        source = config.source(role)
        number = ""
        is_loaded = role == "draft" or not only_draft
        try:
            model = weightless_model(source)
        except UserError:  # loading it says why, in a moment
            is_known = is_known and not is_loaded
        else:
            number = f" ({amount(model.num_parameters(), 'billion', 'million')} parameters)"
            per_weight = float(model.dtype.itemsize)
            stored = short_name(model.dtype)
            if source.quantization and not source.rounded_form:
                per_weight = QUANTIZATIONS[source.quantization].num_bytes
                stored = source.quantization
            if is_loaded:
                sizes.append(model.num_parameters() * per_weight)
                types.append(stored)
        models.append(f"{role} {source.location}{number}")
    lines = [f"pair {config.name or 'without a name'}: {' for '.join(models)}"]
    if sizes and is_known:
        parts = f" ({' + '.join(map(amount, sizes))})" if len(sizes) > 1 else ""
        lines.append(
            f"it needs {amount(sum(sizes))} of memory{parts} for weights in"
            f" {' and '.join(dict.fromkeys(types))}, and more for the keys and values of texts"
        )
    return lines
