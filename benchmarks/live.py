"""What are drafts and rules worth when they decode? From reports of `specheads evaluate` that
decoded their prompts, for each draft, temperature and instruction set one of each seed.

    specheads train heads=lookahead warp.temperature=T seed=S
    specheads evaluate warp.temperature=T seed=S split=final data.final_part=P num_live_prompts=98
    python -m benchmarks.live REPORT... [--keep]

Each seed has a separate part P, so that what is found with different seeds is independent.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Column, Table, Value, add_keep_option, text_of, write_result
from specheads.replay.information import LOGISTIC

COMMAND = (
    "specheads evaluate warp.temperature=T seed=S split=final data.final_part=P num_live_prompts=98"
)
NOTE = (
    "Heads are of `specheads train heads=lookahead warp.temperature=T seed=S`, and the part P is"
    " 9 - S, or 6 for several drafts. AVX2: `ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2`."
    " Settings are chosen on dev prompts. A gain is the geometric mean of the seeds', and its"
    " interval follows from theirs, which are independent; settings are those of most seeds."
    " `python -m benchmarks.live` made the table of the reports."
)
DECODED = ", decoded"  # ends the name of the prompts that a report decoded
FIXED = "fixed_length"
ORACLE = "oracle"
MEASURED = "measured"
TOKEN = "token"
BLOCK = "block"
PLACE = [Column("draft"), Column("instructions"), Column("T")]
LENGTHS = (1, 2, 4, 8)  # of drafts, whose tokens per call the table has
COLUMNS = [
    *PLACE,
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
DRAFT_COLUMNS = [
    *PLACE,
    Column("a step, of the target's", "percent:0"),
    *(Column(f"tokens per call, {length} drafted", "fixed:2") for length in LENGTHS),
    Column("reducible, nats", "fixed:3"),
    Column("known without training", "percent:0"),
    Column("known to the head", "percent:0"),
]
COST_COLUMNS = [
    *PLACE,
    Column("best without training", "signed_percent"),
    Column("head", "signed_percent"),
    Column("head free of charge", "signed_percent"),
    Column("informed ceiling", "signed_percent"),
    Column("the head's share of a draft step", "percent:0"),
    Column("it wins below", "percent:0"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path)
    add_keep_option(parser, "live")
    given = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in given.reports]
    groups: dict[Sequence[Value], list[Mapping[str, Any]]] = {}
    for report in reports:
        groups.setdefault(tuple(place_of(report)), []).append(report)
    in_order = [group for _, group in sorted(groups.items())]
    rows = [row_of(group) for group in in_order]
    drafts = [draft_of(group) for group in in_order]
    tables = [
        Table("drafts", "The drafts, by replay", DRAFT_COLUMNS, drafts),
        Table("live", "Decoded prompts: gains over the best fixed length", COLUMNS, rows),
        Table("costs", "By replay, at the costs of steps", COST_COLUMNS, costs_of(in_order)),
    ]
    for table in tables:
        print(text_of(table), end="\n\n")
    contexts = [report["context"] for report in reports]
    write_result(
        "live",
        tables,
        keep=given.keep,
        command=COMMAND,
        notes=[NOTE],
        split=contexts[0]["split"],
        seeds=sorted({context["seed"] for context in contexts}),
        prompts=prompts_of(reports),
    )


def place_of(report: Mapping[str, Any]) -> list[Value]:
    """Return what PLACE names: a draft by the folder of its run, and the vector instructions of the
    processor.
    """
    context = report["context"]
    draft = context["draft"].removesuffix("/draft").split("/")[-1]
    isa = context["device"].split(", ")[-1]
    return [draft, isa, f"{context['warp']['temperature']:g}"]


def draft_of(reports: Sequence[Mapping[str, Any]]) -> list[Value]:
    """Return a row of DRAFT_COLUMNS: means over reports."""
    rows = []
    for report in reports:
        costs = report["steps"]["costs"]
        tested = tested_of(report)
        lengths = {}
        for row in tested["rules"]:
            if row["rule_name"] == FIXED:
                lengths[row["parameters"]["num_tokens"]] = row["block_efficiency"]
        known = tested["information"]
        of_heads = [
            share["value"] for name, share in known["explained"].items() if name != LOGISTIC
        ]
        rows.append(
            [
                costs["draft_seconds"] / costs["target_seconds"],
                *(lengths[length] for length in LENGTHS),
                known["reducible"]["value"],
                known["explained"][LOGISTIC]["value"],
                max(of_heads, default=math.nan),
            ]
        )
    means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    return [*place_of(reports[0]), *(None if math.isnan(mean) else mean for mean in means)]


def prompts_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, object]]:
    """Return the prompts that were decoded, by their name and seed."""
    found = {}
    for report in reports:
        context = report["context"]
        for name, of_name in context["prompts"].items():
            if name.endswith(DECODED):
                found[f"{name.removesuffix(DECODED)}, seed {context['seed']}"] = {
                    "hash": of_name["sha256"],
                    "number": of_name["num_prompts"],
                    "python": of_name["python"],
                }
    return found


def row_of(reports: Sequence[Mapping[str, Any]]) -> list[Value]:
    """Return a row of COLUMNS for the reports of one temperature."""
    rows = [rows_by_kind(report) for report in reports]
    answers = [report["answer"] for report in reports]
    alone = [report["live"][0]["tokens_per_second"]["value"] for report in reports]
    fixed = [found["fixed", TOKEN] for found in rows]
    decoded = [answer["decoded"]["speedup"] for answer in answers if answer["decoded"]]
    return [
        *place_of(reports[0]),
        sum(alone) / len(alone),
        most_frequent([row["name"] for row in fixed]),
        pooled([row["speedup"] for row in fixed]),
        gain_of(rows, "fixed", BLOCK),
        most_frequent([found["free", TOKEN]["name"] for found in rows]),
        gain_of(rows, "free", TOKEN),
        gain_of(rows, "free", BLOCK),
        gain_of(rows, "head", TOKEN),
        gain_of(rows, "head", BLOCK),
        most_frequent([answer["setting"] for answer in answers]),
        pooled([answer["speedup"] for answer in answers]),
        pooled(decoded),
    ]


def costs_of(groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Value]]:
    """Return rows of COST_COLUMNS."""
    rows = []
    for reports in groups:
        winners = [winners_of(report) for report in reports]
        if any("head" not in found for found in winners):
            continue
        heads = [found["head"] for found in winners]
        free = pooled([found["free"]["gain"] for found in winners])
        charged = pooled([row["gain"] for row in heads])
        uncharged = pooled([row["gain_uncharged"] for row in heads])
        share = sum(row["head_share"] for row in heads) / len(heads)
        # What a head loses is nearly proportional to what it costs
        lost = uncharged["value"] - charged["value"]
        wins_below = share * (uncharged["value"] - free["value"]) / lost
        rows.append(
            [
                *place_of(reports[0]),
                share_of(free),
                share_of(charged),
                share_of(uncharged),
                share_of(pooled([found["ceiling"]["gain"] for found in winners])),
                share,
                max(0.0, wins_below),
            ]
        )
    return rows


def winners_of(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return by kind of rule the replayed row that was the fastest on dev prompts."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in sorted(tested_of(report)["winners"], key=lambda row: -row["dev_speedup"]):
        if row["ratio"] != MEASURED or row["name"] == ORACLE:
            continue
        kind = "head" if row["head"] else "free"
        if row["bound"]:
            kind = "ceiling"
        elif row["rule_name"] == FIXED:
            kind = "fixed"
        found.setdefault(kind, row)
    return found


def tested_of(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a report has on the prompts that settings were not chosen on."""
    [tested] = [each for each in report["data_sets"] if each["role"] == "test"]
    return tested


def rows_by_kind(report: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the best decoded row of each kind of rule and verification."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in report["live"][1:]:
        kind = "head" if row["head"] else "fixed" if row["rule_name"] == FIXED else "free"
        found.setdefault((kind, row["verification"] or TOKEN), row)
    return found


def most_frequent(names: Sequence[str]) -> str:
    """Return a name as code."""
    [(name, _)] = Counter(names).most_common(1)
    return f"`{name}`"


def gain_of(
    rows: Sequence[Mapping[tuple[str, str], Mapping[str, Any]]], kind: str, verification: str
) -> Value:
    """Return by how much a kind of rule is faster than the best fixed length, a share with its
    interval.
    """
    gains = []
    for found in rows:
        row = found.get((kind, verification))
        if row is not None and row["gain"] is not None:
            gains.append(row["gain"])
    if not gains:
        return None
    return share_of(pooled(gains))


def share_of(ratio: Mapping[str, float]) -> Value:
    """Return a ratio as a gain: a share, with its interval."""
    return {name: value - 1 for name, value in ratio.items()}


def pooled(ratios: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the geometric mean of independent ratios, with the interval that follows from
    theirs.
    """
    logs = [math.log(ratio["value"]) for ratio in ratios]
    halves = [math.log(ratio["high"] / ratio["low"]) / 2 for ratio in ratios]
    mean = sum(logs) / len(logs)
    half = math.hypot(*halves) / len(halves)
    return {
        "value": math.exp(mean),
        "low": math.exp(mean - half),
        "high": math.exp(mean + half),
    }


if __name__ == "__main__":
    main()
