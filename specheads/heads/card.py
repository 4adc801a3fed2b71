"""The model card of a head: its shape, its models, its results on held-out prompts, and how to
decode with it.
"""

import re
from collections.abc import Mapping

from specheads.heads.config import HeadConfig

METRICS = {
    "kl": "binary KL divergence of the predictions, nats",
    "auroc": "AUROC of accepted against rejected tokens",
    "brier": "Brier score",
    "ece": "expected calibration error",
}
DEV_ERRORS = {  # on dev prompts, over tokens at every index of a round
    "dev_ece": "expected calibration error in rounds",
    "dev_log_loss": "log loss in rounds, nats",
}
FITTED = {
    "raw": "without calibration",
    "cross_fitted": (
        "with the best one, fitted on one half of the prompts and measured on the other"
    ),
}
USE = """```python
import specheads
head = specheads.load_head("{folder}")
rule = specheads.stopping.HeadThreshold(head{threshold})
decoder = specheads.SpeculativeDecoder(pair, stopping=rule)
```

In plain transformers, without specheads (the code is `custom_generate/generate.py` in this folder):

```python
target.generate(**inputs, custom_generate="{folder}", trust_remote_code=True, draft_model=draft)
```
"""


def properties(config: HeadConfig) -> dict[str, str]:
    """Return what a head is and was trained on, by the name of each property."""
    warp = inert(", ".join(f"{name}={value}" for name, value in config.warp.items()))
    prompts, responses = (config.train.get(name) for name in ("num_prompts", "num_responses"))
    return {
        "draft": _model(config.draft),
        "target": _model(config.target),
        "predicts": f"{config.predicts}, from {', '.join(config.inputs)}",
        "shape": (
            f"{config.input_size} inputs, width {config.width}, {config.depth} residual blocks"
        ),
        "labels": (
            f"{inert(config.label)}, under {warp if config.warp else 'a warp that is not named'}"
        ),
        "trained on": (
            "not known"
            if prompts is None
            else f"{prompts:,} prompts, {responses or prompts:,} responses"
        ),
        "calibrated": (
            "no"
            if config.calibration is None
            else f"by {len(config.calibration['slope'])} indices in the round"
        ),
    }


def card(config: HeadConfig) -> str:
    """Return the model card of a head."""
    results = {
        METRICS.get(name, inert(name)): f"{value:.4f}"
        for name, value in (config.train.get("test") or {}).items()
    }
    for key, measure in DEV_ERRORS.items():
        errors = config.train.get(key) or {}
        results |= {
            f"{measure}, {how}": f"{errors[name]:.4f}"
            for name, how in FITTED.items()
            if name in errors
        }
    recommended = recommendation(config)
    return (
        "---\nlibrary_name: specheads\nlicense: apache-2.0\ntags: [speculative-decoding, specdec++,"
        " custom_generate]\n---\n# Acceptance head\n\nPredicts whether the target will accept a"
        " token that the draft proposes, so that drafting stops in time.\n\n"
        + _table("", "", properties(config))
        + (
            f"## Results on held-out prompts\n\n{_table('measure', 'value', results)}"
            if results
            else ""
        )
        + (f"## What an evaluation says\n\n{recommended}\n\n" if recommended else "")
        + "## Use\n\n"
        + USE.format(
            folder="<this folder or hub id>",
            threshold=', threshold="auto"' if config.recommended else "",
        )
    )


def recommendation(config: HeadConfig) -> str | None:
    """Return what the last evaluation said of a head, as text: the setting to use, and this head's
    best threshold with its speed and what that rests on; None where nothing is stored.
    """
    known = config.recommended or {}
    if "threshold" not in known:
        return None
    text = f"This head is best at threshold {known['threshold']:g}"
    if {"speedup", "speedup_low", "speedup_high"} <= known.keys():
        interval = f"[{known['speedup_low']:.2f}, {known['speedup_high']:.2f}]"
        text += f": {known['speedup']:.2f} times as fast as the target alone {interval}"
    if known.get("verification") not in (None, "token"):
        text += f", faster still under {inert(known['verification'])} verification"
    if "use" not in known:
        return f"{text}."
    return f"Use {inert(known['use'])}. {text}. {inert(known.get('evidence', ''))}"


def _model(model: Mapping[str, str | None]) -> str:
    if not model.get("id"):
        return "not named"
    kind, revision = (
        ("commit", model["commit"]) if "commit" in model else ("revision", model.get("revision"))
    )
    return f"{inert(model['id'])} ({kind} {inert(revision)})"


def inert(name: object) -> str:
    """Return a name that others chose on one line, as code if it could be a link, HTML or the end
    of a table's cell.
    """
    line = " ".join(str(name).split())
    is_plain = re.fullmatch(r"[\w.,;:/+=()\[\] -]*", line)
    if is_plain and not re.search(r"://|www\.|\][\[(:]", line, re.IGNORECASE):
        return line
    return "`" + line.replace("`", "'").replace("|", "\\|") + "`"


def _table(first: str, second: str, rows: dict[str, str]) -> str:
    lines = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return f"| {first} | {second} |\n|---|---|\n{lines}\n"
