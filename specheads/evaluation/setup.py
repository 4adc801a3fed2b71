"""One evaluation: the pair, its heads and prompts, the settings, and the folders of long-lived
results.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path

import torch

from specheads.decoding.engine import resolve_engine
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import counted_share
from specheads.evaluation.candidates import CostTable, RuleChoice, Rules
from specheads.evaluation.prompt_sets import PromptData, PromptSets
from specheads.evaluation.settings import Evaluation
from specheads.heads.head import AcceptanceHead, LocatedHead
from specheads.load import processor_name
from specheads.pair.pair import Pair
from specheads.prompts.prompt import EncodedPrompt
from specheads.replay.head_scores import head_fingerprint
from specheads.replay.recording import Recorder
from specheads.replay.response_tree import RecordSettings
from specheads.storage.journal import Journal
from specheads.storage.runs import is_resumed


def device_name(pair: Pair) -> str:
    """Return the name of the device that the target runs on; of a CPU with the threads and the
    instruction set in use.
    """
    device = pair.target_lm.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = f"{torch.get_num_threads()} threads"
    return f"{processor_name()}, {threads}, {torch.backends.cpu.get_cpu_capability()}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that the numbers depend on."""
    known = {"python": platform.python_version()}
    for name in ("specheads", "torch", "transformers"):
        known[name] = metadata.version(name)
    return known


def load_average() -> float | None:
    """Return the load average over the last minute; None where the system has none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


@dataclass(frozen=True)
class Setup:
    """The heads, the pair, the settings, the prompts and the folders (of recordings, and of this
    run) of one evaluation.
    """

    pair: Pair
    located_heads: Mapping[str, LocatedHead]
    settings: Evaluation
    prompt_data: PromptData
    data_folder: Path
    run_folder: Path
    load: float | None = field(default_factory=load_average)  # the machine's, before anything runs

    @cached_property
    def heads(self) -> dict[str, AcceptanceHead]:
        """The heads by name."""
        return {name: located.head for name, located in self.located_heads.items()}

    @cached_property
    def prompts(self) -> PromptSets:
        """The prompts, without those that these heads learned from."""
        return PromptSets(self.prompt_data, self.pair, self.located_heads, self.settings)

    @cached_property
    def rules(self) -> Rules:
        """The stopping rules; without a head, only those that need none."""
        usable = dict[str, RuleChoice]()
        for name, choice in self.settings.rules.items():
            if self.heads or not choice.cls.uses_head:
                usable[name] = choice
        return usable

    @cached_property
    def head_sizes(self) -> dict[str, float]:
        """By head its cost as a share of a draft step, counted from its weights."""
        return {name: counted_share(head, self.pair.draft_lm) for name, head in self.heads.items()}

    @property
    def window(self) -> int:
        """The memory's positions for decoding: enough for every prompt and its response."""
        return min(
            self.pair.window,
            self.prompt_data.limits.max_prompt_tokens + self.settings.max_new_tokens,
        )

    def recorder(self, amounts: RecordSettings) -> Recorder:
        """Return how prompts are recorded, with these amounts of each."""
        settings = self.settings
        limits = replace(self.prompt_data.limits, max_new_tokens=settings.max_new_tokens)
        return Recorder(self.pair, settings.warp, limits, amounts, settings.seed, self.data_folder)

    def counted_costs(self) -> CostTable:
        """Return the costs of rules at the cost ratios, where nothing is measured."""
        return CostTable(
            {f"{ratio:g}": StepCosts.at_ratio(ratio) for ratio in self.settings.ratios},
            self.head_sizes,
        )

    def journal(self, name: str, prompts: Sequence[EncodedPrompt], **more: object) -> Journal:
        """Return the journal `name` in the run's folder, empty unless the run is resumed.

        `more` also decides what it holds.
        """
        path = self.run_folder / f"{name}.jsonl"
        if not is_resumed(path.parent):
            path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        heads = dict[str, list[object]]()
        for head_name, head in self.heads.items():
            heads[head_name] = [head_fingerprint(head), head.config.calibration]
        settings = self.settings
        pair = self.pair
        provenance = {  # all that decides responses and their times
            "repeats": settings.repeats,
            "drafting": {"class": type(settings.drafting).__name__, **vars(settings.drafting)},
            "verification": settings.verification.label,
            "warp": settings.warp.values(),
            "seed": settings.seed,
            "max_new_tokens": settings.max_new_tokens,
            "pair": [pair.target_revision, pair.draft_revision],
            "dtype": [str(pair.target.dtype), str(pair.draft.dtype)],
            "activations": [pair.activations, pair.draft_activations],
            "engine": resolve_engine(settings.engine),
            "device": device_name(pair),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "prompts": [ids for _, ids in prompts],
            "heads": heads,
        }
        return Journal(path, {**more, **provenance})
