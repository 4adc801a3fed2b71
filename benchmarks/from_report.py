"""Turn one or several `report.json` of `evaluate.py` into a result.

    python benchmarks/from_report.py RESULT [LABEL=]REPORT.json ... --command 'specheads evaluate ...' [--split 'test, read']

Tables: `winners_<data set>` (the best rule of each family, by ratio), `live` (what was decoded), `quality` (of its responses),
`costs` (fitted to its rounds), `reliability` and `drafts`. Rows of several reports are distinguished by their labels. `--fields`
names the fields of a winner to show; a report may have fields that this script does not know. Run it where the evaluation ran, at
the same commit: the processor and the commit are those of this process, everything else is read from the report, also the prompts
and the parts of the final split.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import RESULTS
from benchmarks.results import Column, Table, processor, text_of, write_result

# By field of a winner: its heading and format. Columns that no winner has a value for are left out.
WINNER_FIELDS = {
    "speedup": ("speed-up", "ratio:3"),
    "gain": ("gain", "signed_percent"),
    "gap_ceiling": ("of the gap to the ceiling", "percent"),
    "gap_oracle": ("to the oracle", "percent"),
    "head_share": ("head's cost", "percent:1"),
    "break_even": ("break-even", "percent"),
}
LIVE_FIELDS = {
    "tokens_per_second": ("tokens/s", "fixed:0"),
    "speedup": ("over the target alone", "ratio:3"),
    "predicted_tokens_per_second": ("predicted tokens/s", "fixed:0"),
    "replayed_tokens_per_second": ("replayed tokens/s", "fixed:0"),
    "block_efficiency": ("tokens per round", "fixed"),
    "verification_rate": ("verification rate", "fixed:3"),
    "discard_rate": ("discard rate", "fixed:3"),
    "acceptance_rate": ("accepted / drafted", "fixed"),
    "efficiency_gain": ("tokens per round, over token verification", "ratio"),
}
Reports = Mapping[str, Mapping[str, Any]]


UNTIMED = ("quality", "reliability")  # doubts about measured times do not concern these tables
SHOWN = ["speedup", "gap_ceiling", "head_share", "break_even"]


def main(argv: Sequence[str] | None = None, folder: Path = RESULTS) -> None:
    """Print the tables and write the result to `folder`."""
    parser = argparse.ArgumentParser(prog="benchmarks/from_report.py", description=__doc__.splitlines()[0])
    parser.add_argument("result", help="the name of the result; none: keep none")
    parser.add_argument("reports", nargs="+", help="report.json, or a label and the file: sampled=outputs/.../report.json")
    parser.add_argument("--command", required=True, help="what made the reports")
    parser.add_argument("--split", help="which prompts; default: the data sets of the reports")
    parser.add_argument("--tables", nargs="*", metavar="KEY", help="which tables; default: all")
    parser.add_argument("--note", action="append", default=[])
    parser.add_argument(
        "--fields", nargs="*", default=SHOWN, metavar="FIELD[:FORMAT]", help=f"of winners; default: {' '.join(SHOWN)}"
    )
    arguments = parser.parse_args(argv)
    reports = dict(map(labelled, arguments.reports))
    if len(reports) < len(arguments.reports):
        parser.error("two reports have the same label; write LABEL=REPORT.json")
    fields = dict(map(field_of, arguments.fields))
    tables = [*winner_tables(reports, fields), *live_tables(reports), *quality_tables(reports)]
    tables += [*cost_tables(reports), *reliability_tables(reports), *draft_tables(reports)]
    tables = [table for table in tables if not arguments.tables or table.key in arguments.tables]
    timed = any(table.key not in UNTIMED for table in tables)
    for table in tables:
        print(f"\n{table.key}: {table.title}\n\n{text_of(table)}")
    contexts = [report["context"] for report in reports.values()]
    split = arguments.split or ", ".join(sorted({data["name"] for each in reports.values() for data in each["data_sets"]}))
    seeds = sorted({context["seed"] for context in contexts if context.get("seed") is not None})
    write_result(
        arguments.result,
        tables,
        arguments.command,
        split,
        seeds,
        prompts=prompts_of(reports),
        notes=[*arguments.note, *dict.fromkeys(doubt for each in reports.values() if timed for doubt in each.get("doubts", ()))],
        machine=machine_of(contexts[0]),
        load=load_of(next(iter(reports.values()))),
        final_parts=sorted({part for context in contexts for part in context.get("final_parts", ())}),
        folder=folder,
    )


def load_of(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a report's load averages, and whether its times showed that the machine was quiet; None where it does not say."""
    load = report["context"].get("load")
    return load and {"quiet": not report.get("doubts"), **load}


def field_of(words: str) -> tuple[str, tuple[str, str | None]]:
    """Return a winner's field, its heading and its format, of `field` or `field:format`."""
    name, _, form = words.partition(":")
    heading, usual = WINNER_FIELDS.get(name, (name.replace("_", " "), None))
    return name, (heading, form or usual)


def labelled(words: str) -> tuple[str, dict[str, Any]]:
    """Return a report's label, empty if there is none, and its content."""
    label, _, path = words.rpartition("=") if re.match(r"[^/]+=", words) else ("", "", words)
    return label, json.loads(Path(path).read_text())


def machine_of(context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the machine as a report knows it; its processor is taken to be this one's."""
    versions, device = context.get("versions") or {}, context.get("device")
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": context.get("threads"),
        "torch": versions.get("torch"),
        "python": versions.get("python"),
        "gpu": None if device is None or device.endswith("CPU") or device == "cpu" else device,
    }


def prompts_of(reports: Reports) -> dict[str, dict[str, Any]] | None:
    """Return what identifies each set of prompts in the tables, by its name; None where no report says it.

    A set whose prompts differ between reports has an entry for each, with the report's label.
    """
    records: dict[str, dict[str, Any]] = {}
    for label, report in reports.items():
        context, replayed = report["context"], [data["name"] for data in report["data_sets"]]
        python = (context.get("versions") or {}).get("python")
        for name, prompts in context.get("prompts", {}).items():
            if name in replayed or (report.get("live") and name.endswith(", decoded")):
                record = {"hash": prompts["sha256"], "number": prompts["num_prompts"], "python": prompts.get("python", python)}
                if records.setdefault(name, record) != record:
                    records[f"{label}, {name}"] = record
    return records or None


def table(key: str, title: str, columns: Sequence[Column], rows: Iterable[Sequence]) -> Table:
    """Return a table without its columns that no row has a value in."""
    rows = list(rows)
    kept = [place for place in range(len(columns)) if any(row[place] not in (None, "") for row in rows)]
    return Table(key, title, [columns[place] for place in kept], [[row[place] for place in kept] for row in rows])


def winner_tables(reports: Reports, fields: Mapping[str, tuple[str, str | None]]) -> list[Table]:
    """Return a table for each data set: rows are families, columns fields at each ratio."""
    return [winners_of(name, reports, fields) for name in data_names(reports)]


def winners_of(name: str, reports: Reports, fields: Mapping[str, tuple[str, str | None]]) -> Table:
    by_family, prompts = {}, set()
    for label, data in data_sets(reports, name):
        prompts.add(data["num_prompts"])
        for winner in data["winners"]:
            by_family.setdefault((label, winner["family"]), {})[winner["ratio"]] = winner
    ratios = list(dict.fromkeys(ratio for winners in by_family.values() for ratio in winners))
    columns = [Column("report"), Column("rule")]
    columns += [Column(f"{heading}, {ratio}", form) for ratio in ratios for heading, form in fields.values()]
    rows = [
        [label, family.replace("_", " "), *(winners.get(ratio, {}).get(field) for ratio in ratios for field in fields)]
        for (label, family), winners in by_family.items()
    ]
    counted = " and ".join(map(str, sorted(prompts)))
    title = f"{name}, {counted} prompts: the best rule of each family, chosen on dev prompts at each ratio"
    return table(f"winners_{key_of(name)}", f"{title}; 95 % intervals over prompts", columns, rows)


def live_tables(reports: Reports) -> list[Table]:
    """Return what was decoded, if anything was."""
    columns = [Column("report"), Column("setting"), *(Column(*field) for field in LIVE_FIELDS.values())]
    rows = [
        [label, row["name"], *map(row.get, LIVE_FIELDS)] for label, report in reports.items() for row in report.get("live", ())
    ]
    return [table("live", "Decoded; 95 % intervals over prompts", columns, rows)] if rows else []


def quality_tables(reports: Reports) -> list[Table]:
    """Return the quality of decoded responses, if it was measured."""
    columns = [
        Column("report"),
        Column("setting"),
        Column("rejections per token", "plus_minus:3"),
        Column("perplexity", "plus_minus"),
        Column("win rate over the target alone", "plus_minus:3"),
        Column("score", "plus_minus:3"),
        Column("also over"),
        Column("win rate over that", "plus_minus:3"),
    ]
    rows = []
    for label, report in reports.items():
        for row in report.get("live", ()):
            if quality := row.get("quality"):
                rates = dict(quality["win_rates"])
                alone = rates.pop("target alone", None)
                first = [label, row["name"], quality["rejections_per_token"], quality["perplexity"], alone, quality["score"]]
                rows += [[*first, *pair] for pair in rates.items()] or [[*first, None, None]]
    title = "Decoded responses: how often a response is more likely than another under the target, per token"
    return [table("quality", f"{title}; ± half of the 95 % interval over prompts", columns, rows)] if rows else []


def cost_tables(reports: Reports) -> list[Table]:
    """Return the costs that were fitted to decoded rounds, and how well they explain others."""
    columns = [Column("report"), Column("rounds", "fixed:0"), Column("draft step", "ms:3"), Column("target", "ms:3")]
    columns += [Column("further drafted token", "ms:3"), Column("round", "ms:3")]
    columns += [Column("R2 over responses", "fixed:3"), Column("R2 over rounds", "fixed:3")]
    names = ("draft_seconds", "target_seconds", "verified_seconds", "round_seconds")
    rows = [
        [label, fit["num_rounds"], *(fit["costs"][name] for name in names), fit["r_squared"], fit["round_r_squared"]]
        for label, report in reports.items()
        if (fit := report.get("fit")) and fit.get("r_squared") is not None
    ]
    title = "Costs of decoding, fitted to some responses and checked on the others"
    return [table("costs", title, columns, rows)] if rows else []


def reliability_tables(reports: Reports) -> list[Table]:
    """Return how well predictions agree with what was accepted, if a head or another predictor was checked."""
    columns = [Column("report"), Column("prompts"), Column("predicted by"), Column("AUROC", "fixed:3"), Column("ECE", "fixed:4")]
    columns.append(Column("largest ECE of an index in the round", "fixed:4"))
    rows = [
        [label, name, row["predictor"], row.get("auroc"), row.get("ece"), max(row.get("ece_by_index") or (), default=None)]
        for name in data_names(reports)
        for label, data in data_sets(reports, name)
        for row in data.get("reliability", ())
    ]
    return [table("reliability", "Predicted and observed acceptance of drafted tokens", columns, rows)] if rows else []


def draft_tables(reports: Reports) -> list[Table]:
    """Return what each draft reaches with each kind of rule, if drafts were compared."""
    columns = [Column("report"), Column("draft"), Column("with"), Column("ratio"), Column("rule"), Column("speed-up", "ratio:3")]
    columns += [Column("tokens per round", "fixed"), Column("decoded, tokens/s", "fixed:0")]
    rows = [
        [label, Path(row["draft"]).name, row["kind"], ratio, rule, row["speedup"].get(ratio), row["block_efficiency"].get(ratio)]
        + [row.get("tokens_per_second")]
        for label, report in reports.items()
        for row in report.get("drafts", ())
        for ratio, rule in row["rules"].items()
    ]
    return [table("drafts", "The best rule of each kind with each draft, chosen on dev prompts", columns, rows)] if rows else []


def data_names(reports: Reports) -> list[str]:
    """Return the names of all data sets that were replayed, in their order."""
    return list(dict.fromkeys(data["name"] for report in reports.values() for data in report["data_sets"]))


def data_sets(reports: Reports, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the data sets of a name, with the labels of their reports."""
    return [(label, data) for label, report in reports.items() for data in report["data_sets"] if data["name"] == name]


def key_of(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_")


if __name__ == "__main__":
    main()
