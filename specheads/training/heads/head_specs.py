"""The heads that settings describe: where a setting is a list of values, one head for each combination of values."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from specheads.errors import UserError
from specheads.heads.config import DEFAULT_INPUTS, HeadConfig, can_predict_overlap
from specheads.pair import Pair
from specheads.sampling import Warp
from specheads.training.heads.bank import HeadSpec
from specheads.training.heads.head_shape import HeadLoss, HeadShape


def head_specs(head: HeadShape, loss: HeadLoss, warp: Warp, pair: Pair | None = None) -> list[HeadSpec]:
    """Return the heads of these settings for a pair; without a pair all sizes are 1, to check settings before models are loaded.

    Raises:
        UserError: a key without a value, the same head twice, a head that cannot be built.
    """
    choices = _choices(head, loss)
    if empty := [key for key, values in choices.items() if not values]:
        raise UserError(f"{empty[0]}=[] names no value; give one, or several.")
    combinations = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    specs = [_spec(head.predicts, values, warp, pair) for values in combinations]
    specs = [replace(spec, name=_name(spec, choices), tied_blocks=head.tied_blocks) for spec in specs]
    if len({spec.name for spec in specs}) < len(specs):
        raise UserError("the same head is asked for twice; give each value of each setting once.")
    return specs


def _choices(head: HeadShape, loss: HeadLoss) -> dict[str, Sequence[Any]]:
    """Return the values of heads by key."""
    inputs = head.inputs
    several = {f"head.{name}": getattr(head, name) for name in ("depth", "width", "label")}
    several["head.inputs"] = inputs if inputs and not isinstance(inputs[0], str) else (inputs,)
    several |= {f"loss.{name}": value for name, value in loss.values().items()}
    return {key: value if isinstance(value, tuple) else (value,) for key, value in several.items()}


def _spec(predicts: str, values: Mapping[str, Any], warp: Warp, pair: Pair | None) -> HeadSpec:
    """Return the head of these values, without a name."""
    target_size = 1 if pair is None else pair.target_lm.hidden_size
    inputs = values["head.inputs"] or DEFAULT_INPUTS[predicts]
    config = HeadConfig(
        target_size=target_size if "target_hidden" in values["head.inputs"] else None,
        depth=values["head.depth"],
        width=values["head.width"],
        predicts=predicts,
        inputs=inputs,
        overlap=can_predict_overlap(predicts, inputs),
        label=values["head.label"],
        warp=asdict(warp),
        **_of_pair(pair),
    )
    weights = {key.removeprefix("loss."): value for key, value in values.items() if key.startswith("loss.")}
    if not weights["accept_weight"] and not weights["reject_weight"]:
        raise UserError(
            "loss.accept_weight and loss.reject_weight are both 0, so that nothing is learned; 1 is the usual weight."
        )
    if weights["survival_weighted"] and config.label != "rollout":
        raise UserError(
            f"loss.survival_weighted=true changes nothing with head.label={config.label}, which has no rounds; use it with "
            "head.label=rollout."
        )
    return HeadSpec("", config, **weights)


def _of_pair(pair: Pair | None) -> dict[str, Any]:
    if pair is None:
        return {"hidden_size": 1, "embedding_size": 1}
    return {
        "hidden_size": pair.draft_lm.hidden_size,
        "embedding_size": pair.draft.get_input_embeddings().weight.shape[1],
        "vocab_size": pair.vocab_size,
        "draft": {"id": pair.draft_id, "revision": pair.draft_revision},
        "target": {"id": pair.target_id, "revision": pair.target_revision},
    }


def _name(spec: HeadSpec, choices: Mapping[str, Sequence[Any]]) -> str:
    """Return a head's name: kind, depth, reject weight, and every other setting in which heads of the bank differ."""
    config = spec.config
    tags = {
        "head.width": f"w{config.width}",
        "loss.accept_weight": f"a{spec.accept_weight:g}",
        "loss.survival_weighted": "survival" if spec.survival_weighted else "even",
        "head.label": config.label,
        "head.inputs": "+".join(config.inputs),
    }
    different = [tag for key, tag in tags.items() if len(choices[key]) > 1]
    return "-".join([config.predicts, f"d{config.depth}", f"r{spec.reject_weight:g}", *different]).replace(".", "_")
