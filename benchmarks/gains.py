"""What heads gain at each temperature, with their cost and without, and how that follows from what
they know.

    specheads train warp.temperature=0.5 seed=0 && specheads evaluate warp.temperature=0.5 live=none
    python benchmarks/gains.py outputs/evaluate/*/report.json [--keep gains]

Reads reports of `specheads evaluate`. Those with the same pair and warp are seeds of one setting:
values are means over seeds, and intervals reach from the lowest end of a seed's interval over
prompts to the highest. Rules were chosen on dev prompts.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_keep_option, text_of, write_result
from specheads.evaluation.candidates import FIXED
from specheads.replay.information import LOGISTIC

Json = Mapping[str, object]
Interval = Mapping[str, float]  # value, low, high


class Place(NamedTuple):
    """Where something was measured."""

    pair: str
    warp: str
    prompts: str


Places = Mapping[Place, Sequence[Json]]  # the set of prompts in the report of each seed
RATIO = "10"
LOOK_AHEAD = "look-ahead head"
PAPER = "SpecDec++ head"
# By the beginning of a head's name, in earlier results what it predicts
KINDS = {
    "lookahead": LOOK_AHEAD,
    "next_token": LOOK_AHEAD,
    "specdecpp": PAPER,
    "input_token": PAPER,
}
PREDICTORS = (LOOK_AHEAD, LOGISTIC, PAPER)
PLACE = [Column("pair"), Column("warp"), Column("prompts")]
GAINS = [
    *PLACE,
    Column("seeds"),
    Column(f"{LOOK_AHEAD} at 10", "signed_percent"),
    Column(f"{LOOK_AHEAD} at 5", "signed_percent"),
    Column(f"{LOOK_AHEAD} at 20", "signed_percent"),
    Column(f"excluding its overhead, at {RATIO}", "signed_percent"),
    Column(f"{LOGISTIC} at {RATIO}", "signed_percent"),
    Column(f"{PAPER} at {RATIO}", "signed_percent"),
    Column(f"excluding that overhead, at {RATIO}", "signed_percent"),
]
RELATION = [
    Column("predicts"),
    Column("points"),
    Column("correlation", "fixed"),
    Column("slope", "fixed"),
    Column("offset", "percent:1"),
    Column("typical error", "percent:1"),
]
REDUCIBLE_TITLE = (
    "Reducible uncertainty about a drafted token's acceptance,"
    " and the fraction that predictors explain"
)
KNOWN = [
    *PLACE,
    Column("reducible, nats", "fixed:3"),
    Column("irreducible, nats", "fixed:3"),
    Column(f"{LOOK_AHEAD} explains", "percent"),
    Column(f"{LOGISTIC} explains", "percent"),
    Column(f"{PAPER} explains", "percent"),
]


class Point(NamedTuple):
    """What a predictor explains on one set of prompts, and how much of the gap to the informed
    ceiling it closes.
    """

    predictor: str
    explained: float  # fraction of the reducible uncertainty
    gap: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path, help="report.json files")
    add_keep_option(parser, "gains")
    given = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in given.reports]
    places: dict[Place, list[Json]] = {}
    for report in reports:
        context = report["context"]
        for data in report["data_sets"]:
            if data["role"] == "test" and data["information"]:
                place = Place(context["model"], _warp(context["warp"]), data["name"])
                places.setdefault(place, []).append(data)
    points = _points(places)
    closed = "The share of the gap that is closed, by the explained fraction"
    tables = [
        Table("gains", "Gains over the best fixed length, by ratio", GAINS, list(_gains(places))),
        Table("known", REDUCIBLE_TITLE, KNOWN, list(_known(places))),
        Table("relation", closed, RELATION, list(_relation(points))),
    ]
    for table in tables:
        print(f"\n{table.title}\n\n{text_of(table)}")
    seeds = sorted({report["context"]["seed"] for report in reports})
    split = reports[0]["context"]["split"]
    write_result("gains", tables, given.keep, split=split, seeds=seeds)


def _warp(warp: Mapping[str, float]) -> str:
    text = f"T = {warp['temperature']:g}"
    if warp.get("top_k", 0) != 0:
        text += f", top-k {warp['top_k']:g}"
    if warp.get("top_p", 1) != 1:
        text += f", top-p {warp['top_p']:g}"
    return text


def _kind(name: str) -> str:
    """Return the kind of head that a name begins with; others are their own."""
    for start, kind in KINDS.items():
        if name.startswith(start):
            return kind
    return name


def _best(data: Json, kind: str, ratio: str) -> Json | None:
    """Return the winner at a ratio of a kind of head, or of the confidence logistic regression,
    that was fastest on dev prompts.
    """
    best = None
    for row in data["winners"]:
        if row["ratio"] != ratio or row["bound"] or row["rule_name"] == FIXED:
            continue
        of_logistic = row["head"] is None and row["rule_name"].startswith("logistic")
        if (LOGISTIC if of_logistic else _kind(row["head"] or "")) != kind:
            continue
        if best is None or row["dev_speedup"] > best["dev_speedup"]:
            best = row
    return best


def _mean(values: Sequence[Interval | None]) -> Interval | None:
    """Return the mean of those that are known, and the lowest and the highest limit."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    low = min(value["low"] for value in known)
    high = max(value["high"] for value in known)
    return {"value": statistics.fmean(value["value"] for value in known), "low": low, "high": high}


def _mean_of_best(
    sets: Sequence[Json], kind: str, ratio: str = RATIO, key: str = "gain"
) -> Interval | None:
    """Return the mean over seeds of a value of the best rule of a kind."""
    values = []
    for data in sets:
        row = _best(data, kind, ratio)
        values.append(row and row[key])
    return _mean(values)


def _gains(places: Places) -> Iterator[list[Value]]:
    for place, sets in places.items():
        found = [
            _mean_of_best(sets, LOOK_AHEAD),
            _mean_of_best(sets, LOOK_AHEAD, "5"),
            _mean_of_best(sets, LOOK_AHEAD, "20"),
            _mean_of_best(sets, LOOK_AHEAD, key="gain_uncharged"),
            _mean_of_best(sets, LOGISTIC),
            _mean_of_best(sets, PAPER),
            _mean_of_best(sets, PAPER, key="gain_uncharged"),
        ]
        row: list[Value] = [*place, len(sets)]
        for value in found:
            row.append(value and {name: number - 1 for name, number in value.items()})
        yield row


def _known(places: Places) -> Iterator[list[Value]]:
    for place, sets in places.items():
        reducible = _mean([data["information"]["reducible"] for data in sets])
        irreducible = _mean([data["information"]["irreducible"] for data in sets])
        shares = [_explained(sets, kind) for kind in PREDICTORS]
        yield [*place, reducible, irreducible, *shares]


def _explained(sets: Sequence[Json], kind: str) -> Interval | None:
    """Return the fraction of the reducible uncertainty that a kind of predictor explains."""
    shares = []
    for data in sets:
        for name, share in data["information"]["explained"].items():
            if _kind(name) == kind:
                shares.append(share)
                break
    return _mean(shares)


def _points(places: Places) -> list[Point]:
    points = []
    for sets in places.values():
        for kind in PREDICTORS:
            explained = _explained(sets, kind)
            gap = _mean_of_best(sets, kind, key="gap_ceiling")
            if explained is not None and gap is not None:
                points.append(Point(kind, explained["value"], gap["value"]))
    return points


def _relation(points: Sequence[Point]) -> Iterator[list[Value]]:
    """Yield the line of the share of the gap over the explained fraction, without and with the
    SpecDec++ head.
    """
    for name, kinds in (
        ("before the draft's next step", (LOOK_AHEAD, LOGISTIC)),
        ("all", PREDICTORS),
    ):
        some = [point for point in points if point.predictor in kinds]
        known = np.array([point.explained for point in some])
        gap = np.array([point.gap for point in some])
        slope, offset = np.polyfit(known, gap, 1)
        errors = gap - (slope * known + offset)
        correlation = np.corrcoef(known, gap)[0, 1]
        numbers = (correlation, slope, offset, errors.std())
        yield [name, len(known), *map(float, numbers)]


if __name__ == "__main__":
    main()
