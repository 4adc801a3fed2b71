"""The table of pairs that were measured: one file of `specheads result` for each pair and machine, in benchmarks/pairs/.

    python benchmarks/pairs.py

To add yours: `specheads result report=outputs/evaluate/<date_time>`, copy the file to benchmarks/pairs/<pair>_<machine>.json, run
this script and benchmarks/render.py, and open a pull request. A file that does not fit its schema is named.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import ROOT
from benchmarks.results import Column, Table, Value, text_of, write_result

FOLDER = ROOT / "benchmarks" / "pairs"
SCHEMA = json.loads((ROOT / "specheads" / "evaluation" / "pair_result.schema.json").read_text())
COLUMNS = [
    *(Column("draft"), Column("target"), Column("device"), Column("decoding"), Column("setting")),
    *(
        Column("tokens/s", "fixed:0"),
        Column("over the target alone", "ratio"),
        Column("tokens per round", "fixed"),
        Column("date"),
    ),
]


def results(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Return the results by the names of their files. Raises SystemExit for a file that does not fit the schema."""
    contents = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    for name, content in contents.items():
        for error in Draft202012Validator(SCHEMA).iter_errors(content):
            raise SystemExit(f"{name}.json: {error.message} at {'/'.join(map(str, error.path)) or 'the top'}")
    return contents


def rows_of(content: Mapping[str, Any]) -> list[list[Value]]:
    """Return a row for each setting that was decoded."""
    pair, warp = content["pair"], content["warp"]
    decoding = "greedy" if warp["temperature"] == 0 else f"temperature {warp['temperature']:g}, top-k {warp.get('top_k', 0)}"
    about = [pair["draft"], pair["target"], content["machine"]["device"], decoding]
    return [
        [*about, row["name"], row["tokens_per_second"], row["speedup"], row["block_efficiency"], content["date"]]
        for row in content["live"]
        if row["lossless"]
    ]


def main() -> None:
    contents = results()
    rows = [row for each in contents.values() for row in rows_of(each)]
    table = Table("pairs", "Pairs, as decoded; 95 % intervals over prompts", COLUMNS, rows)
    print(text_of(table))
    doubts = [f"{name}: {doubt}" for name, each in contents.items() for doubt in each["doubts"]]
    write_result("pairs", [table], split="of each file", notes=doubts)


if __name__ == "__main__":
    main()
