"""A command whose jobs do by their seed what tests of sweeps need: 0 writes a file, 1 fails, 2 waits for a signal."""

import os
import time
from pathlib import Path

from data_gen.settings import Generation
from specheads.commands.command import command
from specheads.errors import UserError


@command("data_gen", Generation)
def main(cfg):
    (Path(cfg.paths.run) / "begun").write_text(str(os.getpid()))
    if cfg.seed == 1:
        raise UserError("seed=1 must be another number")
    if cfg.seed == 2:
        time.sleep(600)
    with (Path(cfg.paths.run) / "times").open("a") as stream:
        stream.write("done\n")


if __name__ == "__main__":
    main()
