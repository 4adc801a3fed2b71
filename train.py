"""`python train.py model=llama2-7b`: train an acceptance head, making the data first where it is missing.

`python train.py task=distill` trains the draft itself. `python train.py --help` lists every key, with `task=distill` that task's;
`-m head.depth=0,1,2,3,4 loss.reject_weight=1,3,6,12` sweeps.
"""

from pathlib import Path

from omegaconf import DictConfig

import specheads.training.distill.distillation
import specheads.training.heads.head_training
from specheads.commands.command import command, is_first_process, next_command
from specheads.errors import UserError

TRAINED = {
    "head": specheads.training.heads.head_training.train,
    "distill": specheads.training.distill.distillation.train,
}  # each returns a folder
NEXT = {"head": ("evaluate.py", "head={folder}"), "distill": ("train.py", "model.draft={folder}")}


def train(cfg: DictConfig) -> Path:
    """Train what `cfg.task` names; return its folder."""
    if cfg.task not in TRAINED:
        raise UserError(f"task={cfg.task} is not known; use {' or '.join(TRAINED)}.")
    return TRAINED[cfg.task](cfg)


@command("train")
def main(cfg: DictConfig) -> None:
    folder = train(cfg)
    if is_first_process():
        script, words = NEXT[cfg.task]
        print(f"next: {next_command(script, words.format(folder=folder))}")


if __name__ == "__main__":
    main()
