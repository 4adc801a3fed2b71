"""What decoding and making data cost on a GPU, next to the goals.

    python -m benchmarks.gpu [round data] [--device cuda] [--tiny] [--keep]

Tables are written as soon as they are measured, so that a script which fails or is killed loses none of them. With `--tiny`
models take seconds, only to see that the scripts work.
"""

import argparse
import traceback
from collections.abc import Mapping, Sequence

import torch

from benchmarks.gpu.decoding import data_tables, round_tables
from benchmarks.gpu.machine import Machine
from benchmarks.results import Column, Table, add_keep_option, text_of, write_result
from specheads.pair.config import checked_device

SCRIPTS = {"round": round_tables, "data": data_tables}
GOALS = {  # by name what it says, whether the limit is the least or the most, and the limit
    "target_alone": ("the target alone, of the memory's bandwidth (8B, bfloat16)", "at least", 0.70),
    "verification_of_8": ("a verification of 8 tokens, in steps of the target alone", "at most", 1.05),
    "round": ("a round, in its steps alone", "at most", 1.15),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scripts and print their tables with the goals; return 1 where a script did not end, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"default: {' '.join(SCRIPTS)}")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--tiny", action="store_true", help="use models that take seconds")
    add_keep_option(parser, "gpu")
    given = parser.parse_args(argv)
    setup = Machine(torch.device(checked_device(given.device)), given.tiny)
    tables, reached, failed = list[Table](), dict[str, float](), False
    for name in given.scripts or SCRIPTS:
        torch.manual_seed(0)
        try:
            for table in SCRIPTS[name](setup, reached):
                print(f"\n{table.title}\n\n{text_of(table)}", flush=True)
                tables.append(table)
                written = [_goals(reached), *tables]
                write_result("gpu", written, seeds=[0], notes="Random weights.", keep=given.keep)
        except Exception:  # noqa: BLE001 - whatever one script raises, the others run
            failed = True
            print(f"\nFAILED: {name}\n{traceback.format_exc()}", flush=True)
    print(f"\nThe goals\n\n{text_of(_goals(reached))}")
    return int(failed)


def _goals(reached: Mapping[str, float]) -> Table:
    """Return the goals with what was reached of them."""
    columns = [Column("goal"), Column("limit is"), Column("limit", "fixed:2"), Column("measured", "fixed:2")]
    return Table("goals", "The goals, as ratios", columns, [[*goal, reached.get(name)] for name, goal in GOALS.items()])


if __name__ == "__main__":
    raise SystemExit(main())
