"""The folders that trained heads are exported to."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specheads.heads.checkpoint import save_head
from specheads.heads.head import NUM_GOLDEN
from specheads.heads.train_prompts import TrainPrompts
from specheads.storage.files import write_json
from specheads.training.heads.head_module import HeadModule
from specheads.training.loaders import ResumableData


def export_heads(
    module: HeadModule,
    loaders: ResumableData,
    draft_device: torch.device,
    run: Path,
    trained: Mapping[str, Any],
    learned: TrainPrompts,
) -> Path:
    """Write every head of the bank into a separate folder; return the folder of a single head, or the parent of several.

    Args:
        trained: how they were trained, for their configs.
        learned: the prompts that they were trained on.

    Raises:
        UserError: a head whose predictions do not vary.
    """
    module.to(draft_device)  # Lightning leaves the heads on the CPU
    with torch.no_grad():
        features = module.features(next(iter(loaders.loader("dev", shared=False))).to(draft_device))
    module.check_not_constant(features)
    heads = module.bank.heads
    for spec in module.bank.specs:
        head = heads[spec.name]
        provenance = {
            "optimizer": module.optimizer.values(),
            "accept_weight": spec.accept_weight,
            "reject_weight": spec.reject_weight,
            "survival_weighted": spec.survival_weighted,
            "tied_blocks": spec.tied_blocks,
            **trained,
            "test": module.test_results[spec.name],
            "kl": module.divergences[spec.name],
        }
        head.config, head.train_prompts = replace(head.config, train=provenance), learned
        inputs = head.assemble({name: value[:NUM_GOLDEN] for name, value in features.items()})
        folder = save_head(head, run / "heads" / spec.name, inputs)
    write_json(run / "test.json", module.test_results)
    return folder if len(heads) == 1 else folder.parent
