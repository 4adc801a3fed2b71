"""What heads gain at each temperature, with their cost and without, and how that follows from what
they know.

    specheads train warp.temperature=0.5 seed=0 && specheads evaluate warp.temperature=0.5 live=none
    python benchmarks/gains.py outputs/evaluate/*/report.json [--keep gains] [--figure docs/information.png]

Reads reports of `specheads evaluate`. Those with the same pair and warp are seeds of one setting:
values are means over seeds, and intervals reach from the lowest end of a seed's interval over
prompts to the highest. Rules were chosen on dev prompts.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_keep_option, text_of, write_result
from specheads.evaluation.candidates import FIXED
from specheads.replay.information import LOGISTIC

Json = Mapping[str, Any]
Places = Mapping[
    tuple[str, str, str], Sequence[Json]
]  # the sets of prompts of all seeds, by pair, warp and name
RATIO = "10"
OTHERS = ("5", "20")
LOOK_AHEAD = "look-ahead head"
PAPER = "SpecDec++ head"
KINDS = {"next_token": LOOK_AHEAD, "input_token": PAPER}  # by the beginning of a head's name
PLACE = [Column(name) for name in ("pair", "warp", "prompts")]
GAINS = [
    *PLACE,
    Column("seeds"),
    *(Column(f"{LOOK_AHEAD} at {ratio}", "signed_percent") for ratio in (RATIO, *OTHERS)),
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
REDUCIBLE_TITLE = "Reducible uncertainty about a drafted token's acceptance, and the fraction that predictors explain"
KNOWN = [
    *PLACE,
    *(Column(f"{name}, nats", "fixed:3") for name in ("reducible", "irreducible")),
    *(Column(f"{name} explains", "percent") for name in (LOOK_AHEAD, LOGISTIC, PAPER)),
]


class Point(NamedTuple):
    """What a predictor explains on one set of prompts, and how much of the gap to the informed ceiling
    it closes.
    """

    place: tuple[str, str, str]  # pair, warp, set of prompts
    predictor: str
    explained: Json  # fractions of the reducible uncertainty
    gap: Json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path, help="report.json files")
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help="draw what predictors know and the gap that they close",
    )
    add_keep_option(parser, "gains")
    given = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in given.reports]
    places: dict[tuple[str, str, str], list[Json]] = {}
    for report in reports:
        for data in report["data_sets"]:
            if data["role"] == "test" and data["information"]:
                places.setdefault(
                    (report["context"]["model"], _warp(report["context"]["warp"]), data["name"]), []
                ).append(data)
    gains = Table(
        "gains", "Gains over the best fixed length, by ratio", GAINS, list(_gains(places))
    )
    known = Table("known", REDUCIBLE_TITLE, KNOWN, list(_known(places)))
    points = [point for place, sets in places.items() for point in _points(place, sets)]
    relation = Table(
        "relation",
        "The share of the gap that is closed, by the explained fraction",
        RELATION,
        list(_relation(points)),
    )
    tables = [gains, known, relation]
    for table in tables:
        print(f"\n{table.title}\n\n{text_of(table)}")
    if given.figure:
        _draw(points, given.figure)
    seeds = sorted({report["context"]["seed"] for report in reports})
    write_result(
        "gains", tables, split=reports[0]["context"]["split"], seeds=seeds, keep=given.keep
    )


def _warp(warp: Json) -> str:
    limits = [
        f"{key.replace('_', '-')} {warp[key]:g}"
        for key, off in (("top_k", 0), ("top_p", 1))
        if warp.get(key, off) != off
    ]
    return ", ".join([f"T = {warp['temperature']:g}", *limits])


def _kind(name: str | None) -> str | None:
    return next((kind for start, kind in KINDS.items() if (name or "").startswith(start)), None)


def _best(data: Json, kind: str, ratio: str) -> Json | None:
    """Return the winner at a ratio of a kind of head, or of the free logistic, that was fastest on
    dev prompts.
    """
    winners = [
        row
        for row in data["winners"]
        if row["ratio"] == ratio and not row["bound"] and row["rule_name"] != FIXED
    ]
    if kind == LOGISTIC:
        winners = [
            row
            for row in winners
            if row["head"] is None and row["rule_name"].startswith("logistic")
        ]
    else:
        winners = [row for row in winners if _kind(row["head"]) == kind]
    return max(winners, key=lambda row: row["dev_speedup"], default=None)


def _mean(values: Sequence[Json | None]) -> Json | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = float(np.mean([value["value"] for value in known]))
    return {
        "value": mean,
        "low": min(value["low"] for value in known),
        "high": max(value["high"] for value in known),
    }


def _gains(places: Places) -> Iterator[list[Any]]:
    for place, sets in places.items():

        def gain(
            kind: str, ratio: str = RATIO, key: str = "gain", sets: Sequence[Json] = sets
        ) -> Json | None:
            found = _mean(
                [None if (row := _best(data, kind, ratio)) is None else row[key] for data in sets]
            )
            return found and {name: value - 1 for name, value in found.items()}

        yield [
            *place,
            len(sets),
            *(gain(LOOK_AHEAD, ratio) for ratio in (RATIO, *OTHERS)),
            gain(LOOK_AHEAD, key="gain_uncharged"),
            gain(LOGISTIC),
            gain(PAPER),
            gain(PAPER, key="gain_uncharged"),
        ]


def _known(places: Places) -> Iterator[list[Any]]:
    for place, sets in places.items():
        nats = (
            _mean([data["information"][key] for data in sets])
            for key in ("reducible", "irreducible")
        )
        yield [*place, *nats, *(_explained(sets, kind) for kind in (LOOK_AHEAD, LOGISTIC, PAPER))]


def _explained(sets: Sequence[Json], kind: str) -> Json | None:
    """Return the fraction of the reducible uncertainty that a kind of head, or another predictor, explains."""
    named = [
        {_kind(name) or name: share for name, share in data["information"]["explained"].items()}
        for data in sets
    ]
    return _mean([shares.get(kind) for shares in named])


def _points(place: tuple[str, str, str], sets: Sequence[Json]) -> Iterator[Point]:
    for kind in (LOOK_AHEAD, LOGISTIC, PAPER):
        gap = _mean(
            [row["gap_ceiling"] for data in sets if (row := _best(data, kind, RATIO)) is not None]
        )
        if (explained := _explained(sets, kind)) is not None and gap is not None:
            yield Point(place, kind, explained, gap)


def _relation(points: Sequence[Point]) -> Iterator[list[Any]]:
    """Yield the line of the share of the gap over the explained fraction, without and with the
    SpecDec++ head.
    """
    for name, kinds in (
        ("before the draft's next step", (LOOK_AHEAD, LOGISTIC)),
        ("all", (LOOK_AHEAD, LOGISTIC, PAPER)),
    ):
        known, gap = np.array(
            [
                (each.explained["value"], each.gap["value"])
                for each in points
                if each.predictor in kinds
            ]
        ).T
        slope, offset = np.polyfit(known, gap, 1)
        errors = gap - (slope * known + offset)
        yield [
            name,
            len(known),
            float(np.corrcoef(known, gap)[0, 1]),
            float(slope),
            float(offset),
            float(errors.std()),
        ]


def _draw(points: Sequence[Point], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, marker in ((LOOK_AHEAD, "o"), (PAPER, "s"), (LOGISTIC, "^")):
        some = [point for point in points if point.predictor == name]
        known, gap = (
            [100 * each["value"] for each in values]
            for values in ([p.explained for p in some], [p.gap for p in some])
        )
        axes.scatter(known, gap, s=18, marker=marker, label=name, alpha=0.7)
    axes.axline((0, 0), slope=1, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("explained of what can be known about acceptance, %")
    axes.set_ylabel(
        f"of the gap from the best fixed length\nto the informed ceiling, % (ratio {RATIO})"
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
