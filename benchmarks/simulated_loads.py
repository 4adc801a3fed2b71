"""What are policies on the load worth at real sizes? Recorded acceptance of an embedded pair, costs of larger models by roofline.

    python benchmarks/simulated_loads.py [--model nano] [--head latest] [num_prompts=100 accelerator=h100 target_size=70B ...]

It is `specheads load` with these keys, as one table. Values of policies are chosen on dev prompts for each
load; gains are over the fixed length that is best for that load, and over seven tokens, with intervals over seeds of the traffic.
"""

import argparse
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import ROOT
from benchmarks.results import Column, Table, Value, add_result_option, text_of, write_result
from specheads.evaluation.load import simulate
from specheads.evaluation.serving.candidates import USUAL
from specheads.evaluation.serving.study import LoadTable
from specheads.pair_config import config_folder

COLUMNS = [
    *(Column("requests at once"), Column("policy"), Column("value")),
    *(Column("tokens/s", "fixed:0"), Column("tokens/s of a request", "fixed:1")),
    *(Column("over the target alone", "ratio:2"), Column("over the best fixed length", "signed_percent:1")),
    Column("over K = 7", "signed_percent:1"),
]


def rows_of(tables: list[LoadTable]) -> list[list[Value]]:
    """Return a row for every policy at every load."""
    rows: list[list[Value]] = []
    for table in tables:
        usual = table.row(USUAL).numbers["tokens_per_second"].value
        for row in table.rows:
            speed, user = (row.numbers[name].value for name in ("tokens_per_second", "user_tokens_per_second"))
            over = {name: getattr(row.over_fixed, name) - 1 for name in ("value", "low", "high")}
            name = row.family if row.lossless or row.family.endswith("lossy") else f"{row.family}, lossy"
            value = ", ".join(f"{each:g}" for each in row.value) or None
            alone = speed / table.alone if table.alone else None
            rows.append([table.requests, name, value, speed, user, alone, over, speed / usual - 1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument(
        "--head", default="null", help="a folder of a look-ahead head, or latest; default: policies without a head"
    )
    parser.add_argument("overrides", nargs="*", help="more keys of specheads load")
    add_result_option(parser, "simulated_loads")
    given = parser.parse_args()
    words = [f"model={given.model}", f"head={given.head}", "paths.run=outputs/simulated_loads", *given.overrides]
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        cfg = compose("load", words)
    Path(ROOT / cfg.paths.run).mkdir(parents=True, exist_ok=True)
    tables = simulate(cfg)
    sizes = f"{cfg.target_size} with {cfg.draft_size} on {cfg.accelerator}"
    table = Table("loads", f"Acceptance of {given.model}, costs of {sizes} by roofline", COLUMNS, rows_of(tables))
    print(text_of(table))
    split = f"test, read before; {cfg.num_prompts} prompts, {cfg.num_dev_prompts} dev prompts for the values"
    write_result(given.result, [table], split=split, seeds=list(range(cfg.num_seeds)))


if __name__ == "__main__":
    main()
