"""The model card of a distilled draft."""

from collections.abc import Mapping
from typing import Any


def card(facts: Mapping[str, Any]) -> str:
    """Return the card of a draft from what its `distill.json` says."""
    target, draft, loss, samples = facts["target"], facts["draft"], facts["loss"], facts["samples"]
    shares = ", ".join(f"{kind} {share:g}" for kind, share in samples["mixed"].items())
    rows = {
        "target": f"{target['id']} (revision {target['revision']})",
        "began as": f"{draft['id']} (revision {draft['revision']})",
        "learnt from": f"{samples['samples']} responses{f' ({shares})' if samples['samples'] == 'mixed' else ''} to {facts['num_prompts']:,} prompts",
        "loss": ", ".join(f"{name} {value}" for name, value in loss.items()),
        "steps": f"{facts['steps']:,} in {facts['seconds']:,} s",
        "measured under": ", ".join(f"{name} {value}" for name, value in facts["warp"].items()),
    }
    before, after = facts["test"]["before"], facts["test"]["after"]
    table = "".join(f"| {name} | {before[name]:.4f} | {value:.4f} |\n" for name, value in after.items())
    told = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return (
        "---\nlibrary_name: transformers\ntags: [speculative-decoding, draft-model]\n---\n# Draft model\n\n"
        "Distilled to propose what its target would say, for speculative decoding.\n\n"
        f"| | |\n|---|---|\n{told}\n"
        "On the target's responses to held-out prompts (overlap is the expected acceptance of a drafted token, 1 - TV; the block efficiency "
        f"follows from it):\n\n| | before | after |\n|---|---|---|\n{table}\n"
        '```python\npair = specheads.load_pair(draft="<this folder>", target="<the target>")\n```\n\n'
        "Acceptance heads of another draft do not fit this one: train one with `python train.py model.draft=<this folder>`.\n"
    )
