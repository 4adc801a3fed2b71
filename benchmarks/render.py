"""Write the measured tables of the documentation from `benchmarks/results/*.json`, and the page of
the papers' claims.

    python benchmarks/render.py [--check]

The text between `<!-- table: result/key -->` and `<!-- end -->` is replaced by a table. `--check`
writes nothing, names the tables that differ, and exits with 1 if there are any.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.papers.page import page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    "CONTRIBUTING.md",
    "docs/compatibility.md",
    "docs/measurements/index.md",
    "benchmarks/gpu/README.md",
)
Value = float | int | str | None | Mapping[str, float]
BLOCK = re.compile(r"(<!-- table: ([\w-]+)/([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# By name: (factor of the number, format of its sign, unit after it, default number of digits);
# `name:digits` sets the digits.
FORMATS = {
    "fixed": (1, "", "", 2),
    "percent": (100, "", " %", 0),
    "signed_percent": (100, "+", " %", 1),
    "ratio": (1, "", "x", 2),
    "ms": (1000, "", " ms", 2),  # the value is in seconds
}


class RenderError(ValueError):
    """A block does not fit the results."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or print which ones differ; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/render.py", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a table differs"
    )
    check = parser.parse_args(argv).check
    try:
        differing = update(ROOT, RESULTS, check)
    except RenderError as error:
        print(error, file=sys.stderr)
        return 1
    claims = ROOT / "docs" / "results.md"
    if page() != claims.read_text():
        differing.append(claims.name)
        if not check:
            claims.write_text(page())
    what = "differs from its result; run python benchmarks/render.py" if check else "written"
    for name in differing:
        print(f"{name} {what}")
    return int(check and bool(differing))


def update(root: Path, results: Path, check: bool = False) -> list[str]:
    """Render all documents in `root` and return the tables that differed, as `document:
    result/key`.
    """
    differing = []
    for document in DOCUMENTS:
        path = root / document
        text = path.read_text()
        rendered = render(text, results)
        for old, new in zip(BLOCK.finditer(text), BLOCK.finditer(rendered), strict=True):
            if old.group() != new.group():
                differing.append(f"{document}: {old[2]}/{old[3]}")
        if rendered != text and not check:
            path.write_text(rendered)
    return differing


def render(text: str, results: Path) -> str:
    """Return a document with all its blocks filled."""

    def filled(block: re.Match) -> str:
        return block[1] + "\n".join(_table_lines(results, block[2], block[3])) + "\n" + block[4]

    return BLOCK.sub(filled, text)


def _table_lines(results: Path, name: str, key: str) -> list[str]:
    """Return the lines of a block: title, table, and its source."""
    path = results / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(path.stem for path in results.glob("*.json")))
        raise RenderError(f"there is no result {name!r} in {results.name}/; known: {known}")
    result = json.loads(path.read_text())
    tables = {table["key"]: table for table in result["tables"]}
    if key not in tables:
        raise RenderError(f"result {name!r} has no table {key!r}; it has {', '.join(tables)}")
    table = tables[key]
    names = [column["name"] for column in table["columns"]]
    formats = [column.get("format") for column in table["columns"]]
    shown = markdown(names, formats, table["rows"])
    return ["", f"*{table['title']}*", "", *shown, "", source(result), ""]


def markdown(
    names: Sequence[str], formats: Sequence[str | None], rows: Sequence[Sequence[Value]]
) -> list[str]:
    """Return the lines of a table of values; columns of numbers are aligned to the right."""
    ruler = "|".join("---:" if form else "---" for form in formats)
    lines = [f"| {' | '.join(names)} |", f"|{ruler}|"]
    for row in rows:
        texts = [cell(value, form) for value, form in zip(row, formats, strict=True)]
        lines.append(f"| {' | '.join(texts)} |")
    return lines


def format_of(form: str | None) -> tuple[float, str, str]:
    """Return the factor, the format and the unit that a form such as `percent:1` stands for.

    Raises RenderError for others.
    """
    name, _, digits = (form or "").partition(":")
    if form is None:
        return 1, "g", ""
    if name not in FORMATS or not (digits.isdigit() or not digits):
        raise RenderError(
            f"format {form!r} is not known; known: {', '.join(FORMATS)}, each with or without"
            " `:digits`"
        )
    scale, sign, unit, default = FORMATS[name]
    return scale, f"{sign},.{digits or default}f", unit


def cell(value: Value, form: str | None) -> str:
    """Return a value as text: a number, an interval {value, low, high}, a string, or None."""
    if value is None or isinstance(value, str):
        return (value or "").replace("|", "\\|")
    scale, spec, unit = format_of(form)

    def number(each: float) -> str:
        if form is None:
            return f"{each:,}" if isinstance(each, int) else f"{each:g}"
        digits = int(spec.rpartition(".")[2][:-1])
        return (  # adding zero removes the minus sign of -0.0
            f"{round(scale * each, digits) + 0.0:{spec}}"
        )

    if not isinstance(value, dict):
        return number(value) + unit
    return f"{number(value['value'])}{unit} [{number(value['low'])}, {number(value['high'])}]"


def source(result: Mapping[str, object]) -> str:
    """Return one line that says how a result was made; its file has the rest."""
    parts = [f"`{result['command']}`", result["date"], _machine_text(result["machine"])]
    notes = "".join(f" {note}" for note in result["notes"])
    return f"<sub>{'; '.join(parts)}.{notes}</sub>"


def _machine_text(machine: Mapping[str, object]) -> str:
    """Return the description of a machine; unknown parts are left out."""
    cores = machine.get("cores")
    threads = machine.get("threads")
    texts = [
        machine.get("gpu"),
        f"{cores} cores of {machine['cpu']}" if cores else machine["cpu"],
        f"{threads} thread{'s' * (threads > 1)}" if threads else None,
        f"torch {machine['torch']}" if machine.get("torch") else None,
    ]
    return ", ".join(text for text in texts if text)


if __name__ == "__main__":
    raise SystemExit(main())
