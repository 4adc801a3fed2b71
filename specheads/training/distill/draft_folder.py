"""The folder of a distilled draft: an ordinary transformers model with its tokenizer, its provenance and a model card."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from specheads.language_model import draft_temperature
from specheads.pair import Pair, load_draft
from specheads.revisions import without_bars
from specheads.storage.files import write_json
from specheads.training.distill.settings import Distillation

DESCRIPTION = "distill.json"  # where the draft comes from, and its quality before and after


def export(
    pair: Pair,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    folder: Path,
    description: Mapping[str, Any],
    finish: Callable[[Pair], dict[str, float]],
) -> dict[str, float]:
    """Write the pair's draft, with `weights` in `dtype`, as a folder; return its quality.

    Args:
        description: for `distill.json`; its entry "test" has the quality before training, under "before".
        finish: returns the quality of a pair's draft, and may change its config. It gets the draft as the folder has it.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with without_bars():
        pair.draft.save_pretrained(temporary, state_dict={name: weight.to(dtype) for name, weight in weights.items()})
    pair.draft.config.dtype = dtype  # save_pretrained has set it to that of the weights in training
    pair.draft.config.save_pretrained(temporary)
    pair.tokenizer.save_pretrained(temporary)
    finished = replace(pair, draft=load_draft(temporary, pair, dtype).model)
    after = finish(finished)
    finished.draft.config.save_pretrained(temporary)
    content = {**description, "temperature": draft_temperature(finished.draft), "test": {**description["test"], "after": after}}
    write_json(temporary / DESCRIPTION, content)
    (temporary / "README.md").write_text(model_card(content))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
    return after


def draft_provenance(pair: Pair, settings: Distillation, data: Path, num_prompts: int) -> dict[str, Any]:
    """Return where a distilled draft comes from: models, settings, data."""
    samples = {"samples": settings.samples, "mixed": settings.mixed.values(), "refresh_every": settings.refresh_every}
    init = {"init": settings.init, "layers": settings.init_layers, "config": settings.init_config or {}, "seed": settings.seed}
    return {
        "name": pair.name,
        "draft": {"id": pair.draft_id, "revision": pair.draft_revision},
        "target": {"id": pair.target_id, "revision": pair.target_revision},
        "init": init,
        "loss": settings.loss.values(),
        "samples": samples,
        "optimizer": settings.optimizer.for_width(pair.draft_lm.hidden_size).values(),
        "warp": asdict(settings.warp),
        "data": data.name,
        "num_prompts": num_prompts,
        "seed": settings.seed,
    }


def model_card(description: Mapping[str, Any]) -> str:
    """Return the model card of a draft from the content of its `distill.json`."""
    target, draft, loss, samples = (description[name] for name in ("target", "draft", "loss", "samples"))
    shares = ", ".join(f"{kind} {share:g}" for kind, share in samples["mixed"].items())
    rows = {
        "target": f"{target['id']} (revision {target['revision']})",
        "initial draft": f"{draft['id']} (revision {draft['revision']})",
        "trained on": f"{samples['samples']} responses{f' ({shares})' if samples['samples'] == 'mixed' else ''} to "
        f"{description['num_prompts']:,} prompts",
        "loss": ", ".join(f"{name} {value}" for name, value in loss.items()),
        "steps": f"{description['steps']:,} in {description['seconds']:,} s",
        "draft temperature": f"{description['temperature']:g}, fitted on dev prompts",
        "measured under": ", ".join(f"{name} {value}" for name, value in description["warp"].items()),
    }
    before, after = description["test"]["before"], description["test"]["after"]
    figures = "".join(f"| {name} | {before[name]:.4f} | {value:.4f} |\n" for name, value in after.items())
    settings = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return (
        "---\nlibrary_name: transformers\ntags: [speculative-decoding, draft-model]\n---\n# Draft model\n\n"
        "A draft for speculative decoding, distilled to propose what its target would say.\n\n"
        f"| | |\n|---|---|\n{settings}\n"
        "Measured on the target's responses to held-out prompts. Overlap is the expected acceptance of a drafted token, 1 - TV; "
        f"the block efficiency follows from it.\n\n| | before | after |\n|---|---|---|\n{figures}\n"
        '```python\npair = specheads.load_pair(draft="<this folder>", target="<the target>")\n```\n\n'
        "Acceptance heads of another draft do not fit this one: train one with `specheads train model.draft=<this folder>`.\n"
    )
