"""Write every table of docs/measurements and of benchmarks/gpu/README.md from `benchmarks/results/*.json`.

    python benchmarks/render.py [--check]

The text between `<!-- table: result/key -->` and `<!-- end -->` is replaced by a table. A block may show a part of a wide table:
`<!-- table: result/key; columns: rule | gain at 10; rows: label=sampled | depth=3 -->`. `--check` writes nothing, names the
tables that differ, and exits with 1 if there are any.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = "docs/measurements"
DOCUMENTS = (
    "docs/compatibility.md",
    "docs/tests.md",
    *sorted(f"{PAGES}/{path.name}" for path in (ROOT / PAGES).glob("*.md") if path.stem != "archive"),
    "benchmarks/gpu/README.md",
)
BLOCK = re.compile(r"(<!-- table: ([\w-]+)/([\w-]+)(; [^\n]*?)? -->\n).*?(<!-- end -->)", re.DOTALL)
# By name: (factor of the number, format of its sign, unit after it, default number of digits); `name:digits` sets the digits.
FORMATS = {
    "fixed": (1, "", "", 2),
    "percent": (100, "", " %", 0),
    "signed_percent": (100, "+", " %", 1),
    "ratio": (1, "", "x", 2),
    "ms": (1000, "", " ms", 2),  # of seconds
    "plus_minus": (1, "", "", 2),  # half the width of an interval
}


class RenderError(ValueError):
    """A block does not fit the results."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or print which ones differ; return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/render.py", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a table differs")
    arguments = parser.parse_args(argv)
    try:
        differing = update(ROOT, RESULTS, arguments.check)
    except RenderError as error:
        print(error, file=sys.stderr)
        return 1
    for name in differing:
        print(f"{name} {'differs from its result; run python benchmarks/render.py' if arguments.check else 'written'}")
    return int(arguments.check and bool(differing))


def update(root: Path, results: Path, check: bool = False) -> list[str]:
    """Render all documents in `root` and return the tables that differed, as `document: result/key`."""
    differing = []
    for document in DOCUMENTS:
        path = root / document
        text = path.read_text()
        rendered = render(text, results)
        before, after = BLOCK.finditer(text), BLOCK.finditer(rendered)
        differing += [
            f"{document}: {old[2]}/{old[3]}" for old, new in zip(before, after, strict=True) if old.group() != new.group()
        ]
        if rendered != text and not check:
            path.write_text(rendered)
    return differing


def render(text: str, results: Path) -> str:
    """Return a document with all its blocks filled."""

    def filled(block: re.Match) -> str:
        lines = table_lines(results, block[2], block[3], block[4])
        return block[1] + "\n".join(lines) + "\n" + block[5]

    return BLOCK.sub(filled, text)


def table_lines(results: Path, name: str, key: str, part: str | None = None) -> list[str]:
    """Return the lines of a block: title, table (or the `part` of it that the block names), and its source."""
    result = load(results, name)
    table = part_of(table_of(result, key), part or "")
    names, formats = ([column.get(field) for column in table["columns"]] for field in ("name", "format"))
    rows = [[cell(value, form) for value, form in zip(row, formats, strict=True)] for row in table["rows"]]
    return ["", f"*{table['title']}*", "", *markdown(names, formats, rows), "", source(result), ""]


def part_of(table: dict[str, Any], part: str) -> dict[str, Any]:
    """Return a table with the columns and rows that a block names, or all of them if it names none."""
    asked = dict(re.findall(r"; (columns|rows): ([^;]+)", part))
    names = [column["name"] for column in table["columns"]]
    columns = asked["columns"].split(" | ") if "columns" in asked else names
    wanted = dict(condition.split("=", 1) for condition in asked["rows"].split(" | ")) if "rows" in asked else {}
    if missing := [name for name in (*columns, *wanted) if name not in names]:
        raise RenderError(f"table {table['key']!r} has no column {missing[0]!r}; it has {', '.join(names)}")
    rows = [row for row in table["rows"] if all(f"{row[names.index(name)]}" == value for name, value in wanted.items())]
    if not rows:
        raise RenderError(f"table {table['key']!r} has no row with {asked['rows']}")
    places = [names.index(name) for name in columns]
    return table | {"columns": [table["columns"][i] for i in places], "rows": [[row[i] for i in places] for row in rows]}


def load(results: Path, name: str) -> dict[str, Any]:
    """Return a result's content."""
    path = results / f"{name}.json"
    if not path.exists():
        raise RenderError(f"there is no result {name!r} in {results.name}/; known: {', '.join(known(results))}")
    return json.loads(path.read_text())


def known(results: Path) -> list[str]:
    return sorted(path.stem for path in results.glob("*.json"))


def table_of(result: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return one of a result's tables."""
    for table in result["tables"]:
        if table["key"] == key:
            return table
    keys = ", ".join(table["key"] for table in result["tables"])
    raise RenderError(f"result {result['name']!r} has no table {key!r}; it has {keys}")


def markdown(names: Sequence[str], formats: Sequence[str | None], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; columns of numbers are aligned to the right."""
    ruler = "|".join("---:" if form else "---" for form in formats)
    return [f"| {' | '.join(names)} |", f"|{ruler}|", *(f"| {' | '.join(row)} |" for row in rows)]


def format_of(form: str | None) -> tuple[str, float, str, str, int] | None:
    """Return the parts of a format such as `percent:1`. Raises RenderError for an unknown one."""
    if form is None:
        return None
    name, _, digits = form.partition(":")
    if name not in FORMATS or not (digits.isdigit() or not digits):
        raise RenderError(f"format {form!r} is not known; known: {', '.join(FORMATS)}, each with or without `:digits`")
    scale, sign, suffix, default = FORMATS[name]
    return name, scale, sign, suffix, int(digits or default)


def cell(value: Any, form: str | None) -> str:
    """Return a value as text: a number, an interval {value, low, high}, a string, or None."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.replace("|", "\\|")
    parts = format_of(form)
    if not isinstance(value, dict):
        return number(value, parts) + (parts[3] if parts else "")
    low, high = value["low"], value["high"]
    if parts and parts[0] == "plus_minus":
        return f"{number(value['value'], parts)} ±{number((high - low) / 2, parts)}"
    return f"{number(value['value'], parts)}{parts[3] if parts else ''} [{number(low, parts)}, {number(high, parts)}]"


def number(value: float, parts: tuple[str, float, str, str, int] | None) -> str:
    """Return a number without its unit."""
    if parts is None:
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    _, scale, sign, _, digits = parts
    rounded = round(scale * value, digits) + 0.0  # adding zero removes the minus sign of -0.0
    return f"{rounded:{sign},.{digits}f}"


def source(result: Mapping[str, Any]) -> str:
    """Return one line that says where a result comes from."""
    parts = [f"`{result['command']}`", result["date"]]
    parts.append(f"commit {result['commit']}" if result["commit"] else "commit not recorded")
    parts.append(machine_text(result["machine"]))
    if result["load"]:
        state = "quiet" if result["load"]["quiet"] else "busy with other work, too"
        loads = [f"{result['load'][name]:g}" for name in ("start", "end") if result["load"].get(name) is not None]
        parts.append(f"{state} (load {' to '.join(loads)})")
    parts.append(f"prompts: {result['split'] or 'none'}")
    if result["prompts"]:
        parts.append(prompts_text(result["prompts"]))
    if result["seeds"]:
        parts.append(seed_text(result["seeds"]))
    return f"<sub>{'; '.join(parts)}.{''.join(f' {note}' for note in result['notes'])}</sub>"


def prompts_text(prompts: Mapping[str, Any]) -> str:
    """Return the number and the hash of prompts, or of each named set of prompts."""
    sets = {"": prompts} if "hash" in prompts else {f"{name}: ": prompt_set for name, prompt_set in prompts.items()}
    return ", ".join(f"{name}{entry['number']} prompts of hash {entry['hash']}" for name, entry in sets.items())


def seed_text(seeds: Sequence[int]) -> str:
    """Return `seed 0`, `seeds 1, 7` or, for a range, `seeds 0 to 39`."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def machine_text(machine: Mapping[str, Any]) -> str:
    """Return the description of a machine; unknown parts are left out."""
    cores, threads = machine.get("cores"), machine.get("threads")
    texts = [
        machine.get("gpu"),
        f"{cores} cores of {machine['cpu']}" if cores else machine["cpu"],
        f"{threads} thread{'s' * (threads > 1)}" if threads else None,
        f"torch {machine['torch']}" if machine.get("torch") else None,
        f"Python {machine['python']}" if machine.get("python") else None,
    ]
    return ", ".join(text for text in texts if text)


if __name__ == "__main__":
    raise SystemExit(main())
