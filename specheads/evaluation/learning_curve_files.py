"""A learning curve as files: learning_curve.html, .json and .csv."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specheads.evaluation.learning_curve_report import Curve
from specheads.evaluation.report_files import write_rows
from specheads.storage.files import write_json, write_whole

NAME = "learning_curve"


def write_curves(curves: Sequence[Curve], context: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the curves as a page, as JSON and as a table; return the paths."""
    from specheads.evaluation.learning_curve_figure import page_of  # imports plotly

    written = [folder / f"{NAME}.{suffix}" for suffix in ("html", "json", "csv")]
    write_whole(written[0], lambda path: path.write_text(page_of(curves), encoding="utf-8"))
    write_json(written[1], {"context": dict(context), "curves": [asdict(curve) for curve in curves]})
    rows = [{"data_set": curve.name} | asdict(point) for curve in curves for point in curve.points]
    write_whole(written[2], lambda path: write_rows(rows, path))
    return written
