"""Distillations of a tiny draft whose curves do not depend on the processes: in a test's process,
or as a script in several.

    torchrun --standalone --nproc-per-node=2 tests/process_curves.py FOLDER

runs what `SHARED` lists, and writes each curve to FOLDER/<name>.json.
"""

import json
import sys
from pathlib import Path

import lightning as L
import numpy as np
import torch
from fakes import cut, tiny_pair
from feature_drafts import reading_pair

from specheads import Warp
from specheads.interrupts import Interrupted, Request
from specheads.pair.draft_vocabulary import borrow_embedding
from specheads.training.distill.distill_module import DistillModule
from specheads.training.distill.distillation import prepare
from specheads.training.distill.samples import Samples, held_out
from specheads.training.distill.settings import Distillation
from specheads.training.loaders import ResumableData
from specheads.training.trainer import new_trainer

# The last batch of an epoch has one row: of two processes, one has none.
VOCAB = 10
ROWS = 9
BATCH = 4
STOP = 3
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, VOCAB, size) for size in RANDOM.integers(2, 6, ROWS)]
ANSWERS = [RANDOM.integers(0, VOCAB, size) for size in RANDOM.integers(1, 9, ROWS)]
RESPONSES = [[answer] for answer in ANSWERS]
TRAINER = {
    "max_epochs": 2,
    "accelerator": "cpu",
    "precision": "32-true",
    "log_every_n_steps": 1,
    "gradient_clip_val": 0.3,
}
BASE = Distillation(optimizer={"lr": 1e-2}, warp=Warp(1.0, top_k=6), trainer=TRAINER)
ACCUMULATED = BASE.but(trainer={**TRAINER, "accumulate_grad_batches": 2})
# Plain gradient descent without a limit: steps of AdamW and limited ones hide a gradient that is
# too large.
PLAIN = BASE.but(trainer={**TRAINER, "gradient_clip_val": None})
FSDP2_PLAIN = BASE.but(trainer={**TRAINER, "gradient_clip_val": None, "strategy": "fsdp2"})
FSDP2 = BASE.but(trainer={**TRAINER, "strategy": "fsdp2"})
# An output over some tokens, and the target's input embeddings.
CUT = BASE.but(draft_vocabulary=5, embedding="target")
FSDP2_CUT = CUT.but(trainer={**TRAINER, "strategy": "fsdp2"})
# A draft that reads its target
READING = BASE.but(draft_kind="eagle3")
FSDP2_READING = READING.but(trainer={**TRAINER, "strategy": "fsdp2"})
SETTINGS = {"target": BASE, "accumulated": ACCUMULATED, "plain": PLAIN, "cut": CUT}
SETTINGS["reading"] = READING
# By name: the settings, whether the run stops, and the run that it resumes. Runs named `one_` are
# of one process.
SHARED = {
    "two_target": (BASE, False, None),
    "two_accumulated": (ACCUMULATED, False, None),
    "fsdp2_target": (FSDP2, False, None),
    "two_plain": (PLAIN, False, None),
    "fsdp2_plain": (FSDP2_PLAIN, False, None),
    "fsdp2_cut": (FSDP2_CUT, False, None),
    "two_reading": (READING, False, None),
    "fsdp2_reading": (FSDP2_READING, False, None),
    "two_stopped": (BASE, True, None),
    "fsdp2_stopped": (FSDP2, True, None),
    "two_resumed": (BASE, False, "one_stopped_target"),
    "fsdp2_resumed": (FSDP2, False, "one_stopped_target"),
    "fsdp2_cut_stopped": (FSDP2_CUT, True, None),
    "fsdp2_cut_resumed": (FSDP2_CUT, False, "one_stopped_cut"),
}


class StopAt(L.Callback):
    """Asks the last process to end after some steps, as a scheduler's signal would."""

    def __init__(self, step, request):
        self.step = step
        self.request = request

    def on_before_optimizer_step(self, trainer, *args):
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            self.request.number = 15


def checkpoint_of(folder, name):
    return folder / name / "checkpoints" / "last.ckpt"


def curve(folder, name, settings, stops=False, resumes=None):
    """Train.

    Return the points (step, values) of the curve, without their epochs, and the sum of each
    weight's entries.
    """
    pair = tiny_pair(VOCAB, scale=2.0)
    if settings.draft_kind == "eagle3":
        pair = reading_pair(pair, borrows=True)
    if settings.draft_vocabulary is not None:
        pair = cut(pair, range(0, VOCAB, 2))
        borrow_embedding(pair.draft, pair.target)
    prepare(pair.draft)
    module = DistillModule(pair, settings)
    if settings.trainer.gradient_clip_val is None:
        module.configure_optimizers = lambda: torch.optim.SGD(module.draft.parameters(), lr=0.1)
    others = held_out(PROMPTS, ANSWERS)
    splits = {"train": Samples(PROMPTS, RESPONSES), "dev": others, "test": others}
    data = ResumableData(splits, BATCH, seed=0, collate=list)
    trainer, checkpoints = new_trainer(settings, folder / name, [], "cpu", provenance={})
    checkpoints.request = Request()
    if stops:
        trainer.callbacks.append(StopAt(STOP, checkpoints.request))
    try:
        trainer.fit(module, data, ckpt_path=checkpoint_of(folder, resumes) if resumes else None)
    except Interrupted:
        return None
    weights = trainer.strategy.lightning_module_state_dict()
    return {
        "points": module.history,
        "weights": {key: weight.double().flatten().tolist() for key, weight in weights.items()},
    }


def main(folder):
    torch.set_num_threads(1)
    for name, (settings, stops, resumes) in SHARED.items():
        found = curve(folder, name, settings, stops, resumes)
        if found and torch.distributed.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
