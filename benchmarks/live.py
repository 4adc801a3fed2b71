"""What is a rule worth when it decodes? From reports of `specheads evaluate` that decoded their
prompts, one for each temperature, seed and instruction set.

    specheads train heads=lookahead warp.temperature=T seed=S
    specheads evaluate warp.temperature=T split=final data.final_part=9 num_live_prompts=98
    python -m benchmarks.live REPORT... [--keep]
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import Column, Table, Value, add_keep_option, text_of, write_result

COMMAND = "specheads evaluate warp.temperature=T split=final data.final_part=9 num_live_prompts=98"
NOTE = (
    "The head is of `specheads train heads=lookahead warp.temperature=T`. AVX2:"
    " `ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2`. Settings are chosen on dev prompts;"
    " `python -m benchmarks.live` made the table of the reports."
)
DECODED = ", decoded"  # ends the name of the prompts that a report decoded
FIXED = "fixed_length"
TOKEN = "token"
BLOCK = "block"
COLUMNS = [
    Column("instructions"),
    Column("T"),
    Column("target alone, tokens/s", "fixed:0"),
    Column("best fixed length"),
    Column("times the target alone", "ratio"),
    Column("the same, block", "signed_percent"),
    Column("best without training"),
    Column("over it", "signed_percent"),
    Column("that, block", "signed_percent"),
    Column("head", "signed_percent"),
    Column("head, block", "signed_percent"),
    Column("recommended"),
    Column("predicted", "ratio"),
    Column("decoded", "ratio"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path)
    add_keep_option(parser, "live")
    given = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in given.reports]
    rows = sorted(map(row_of, reports), key=lambda row: (str(row[0]), float(str(row[1]))))
    table = Table("live", "Decoded prompts: gains over the best fixed length", COLUMNS, rows)
    print(text_of(table))
    contexts = [report["context"] for report in reports]
    write_result(
        "live",
        [table],
        keep=given.keep,
        command=COMMAND,
        notes=[NOTE],
        split=contexts[0]["split"],
        seeds=sorted({context["seed"] for context in contexts}),
        prompts=prompts_of(contexts[0]),
    )


def prompts_of(context: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    """Return the prompts that were decoded, by their name."""
    found = {}
    for name, of_name in context["prompts"].items():
        if name.endswith(DECODED):
            found[name.removesuffix(DECODED)] = {
                "hash": of_name["sha256"],
                "number": of_name["num_prompts"],
                "python": of_name["python"],
            }
    return found


def row_of(report: Mapping[str, Any]) -> list[Value]:
    """Return a row of COLUMNS."""
    context = report["context"]
    alone, *others = report["live"]
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in others:
        kind = "head" if row["head"] else "fixed" if row["rule_name"] == FIXED else "free"
        found.setdefault((kind, row["verification"] or TOKEN), row)
    answer = report["answer"]
    fixed = found["fixed", TOKEN]
    return [
        context["device"].split(", ")[-1],
        f"{context['warp']['temperature']:g}",
        alone["tokens_per_second"]["value"],
        f"`{fixed['name']}`",
        fixed["speedup"],
        gain_of(found, "fixed", BLOCK),
        f"`{found['free', TOKEN]['name']}`",
        gain_of(found, "free", TOKEN),
        gain_of(found, "free", BLOCK),
        gain_of(found, "head", TOKEN),
        gain_of(found, "head", BLOCK),
        f"`{answer['setting']}`",
        answer["speedup"],
        answer["decoded"]["speedup"] if answer["decoded"] else None,
    ]


def gain_of(found: Mapping[tuple[str, str], Mapping[str, Any]], kind: str, rule: str) -> Value:
    """Return by how much a setting is faster than the best fixed length, a share with its
    interval.
    """
    row = found.get((kind, rule))
    if row is None or row["gain"] is None:
        return None
    return {name: value - 1 for name, value in row["gain"].items()}


if __name__ == "__main__":
    main()
