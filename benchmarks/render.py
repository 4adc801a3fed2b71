"""Write the measured tables of the documentation from `benchmarks/results/*.json`.

    python benchmarks/render.py [--check]

The text between `<!-- table: result/key -->` and `<!-- end -->` is replaced by a table. `--check`
writes nothing, names the tables that differ, and exits with 1 if there are any.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    "CONTRIBUTING.md",
    "docs/compatibility.md",
    "docs/drafts.md",
    "docs/measurements/index.md",
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


def main(words: Sequence[str]) -> int:
    """Write the tables, or print which ones differ; return the exit code."""
    check = "--check" in words
    differing = update(ROOT, check)
    what = "differs from its result; run python benchmarks/render.py" if check else "written"
    for name in differing:
        print(f"{name} {what}")
    return int(check and bool(differing))


def update(root: Path, check: bool = False) -> list[str]:
    """Render all documents in `root` and return the tables that differed, as `document:
    result/key`.
    """
    differing = []
    for document in DOCUMENTS:
        path = root / document
        text = path.read_text()
        rendered = BLOCK.sub(_filled, text)
        for old, new in zip(BLOCK.finditer(text), BLOCK.finditer(rendered), strict=True):
            if old.group() != new.group():
                differing.append(f"{document}: {old[2]}/{old[3]}")
        if not check:
            path.write_text(rendered)
    return differing


def _filled(block: re.Match) -> str:
    """Return a block with its title, table, and source."""
    result = json.loads((RESULTS / f"{block[2]}.json").read_text())
    table = next(each for each in result["tables"] if each["key"] == block[3])
    names = [column["name"] for column in table["columns"]]
    formats = [column["format"] for column in table["columns"]]
    shown = markdown(names, formats, table["rows"])
    lines = ["", f"*{table['title']}*", "", *shown, "", source(result), ""]
    return block[1] + "\n".join(lines) + "\n" + block[4]


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


def cell(value: Value, form: str | None) -> str:
    """Return a value as text: a number, an interval {value, low, high}, a string, or None."""
    if value is None or isinstance(value, str):
        return (value or "").replace("|", "\\|")
    if form is None:
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    name, _, given = form.partition(":")
    scale, sign, unit, usual = FORMATS[name]
    digits = int(given or usual)

    def number(each: float) -> str:
        # Adding zero removes the minus sign of -0.0
        return f"{round(scale * each, digits) + 0.0:{sign},.{digits}f}"

    if not isinstance(value, dict):
        return number(value) + unit
    return f"{number(value['value'])}{unit} [{number(value['low'])}, {number(value['high'])}]"


def source(result: Mapping[str, object]) -> str:
    """Return one line that says how a result was made; its file has the rest."""
    parts = [f"`{result['command']}`", result["date"], _machine_text(result["machine"])]
    notes = "".join(f" {note}" for note in result["notes"])
    return f"<sub>{'; '.join(parts)}.{notes}</sub>"


def _machine_text(machine: Mapping[str, object]) -> str:
    """Return the description of a machine."""
    threads = machine["threads"]
    texts = [
        machine["gpu"],
        f"{machine['cores']} cores of {machine['cpu']}",
        f"{threads} thread{'s' * (threads > 1)}",
        f"torch {machine['torch']}",
    ]
    return ", ".join(text for text in texts if text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
