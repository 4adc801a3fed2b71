"""Which small changes of the code the tests notice: mutation testing with mutmut.

    pip install 'mutmut>=3.8' && python tests/mutants.py [--minutes 60] [specheads.replay.replay*]

`[tool.mutmut]` in pyproject.toml names the modules that are changed, and the tests; each mutant is
given those that call its function. mutmut keeps what it found in mutants/, so a run that ends early
is continued by the next one; for a run from nothing remove that folder.

A mutant that no test notices may be harmless. `benchmarks/results/mutants.json` has how many those
are in each module, and a module that has more of them now makes the exit code 1: look at the new
ones (`mutmut results`, `mutmut show NAME`), and test what they break, or write the new count
(`--keep`).
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import RESULTS, ROOT
from benchmarks.results import Column, Table, add_keep_option, text_of, write_result

MUTMUT = str(Path(sys.executable).with_name("mutmut"))
COUNTS = ("mutants", "killed", "timed out", "survived")
UNKNOWN = "not checked"


def run(minutes: float, names: list[str]) -> None:
    """Test the mutants that were not tested yet, for at most so many minutes."""
    options = f"-p tests.fastest_first {os.environ.get('PYTEST_ADDOPTS', '')}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": options}
    command = [MUTMUT, "run", "--max-children", "2", *names]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        code = process.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # what was found so far is kept
        process.wait()
        return
    if code:
        raise SystemExit(code)


def outcomes_by_module(listed: str) -> dict[str, Counter[str]]:
    """Return how often each outcome occurs in each module, from the list that mutmut prints."""
    found = defaultdict[str, Counter[str]](Counter)
    for name, outcome in re.findall(r"^ *specheads\.(\S+): (.+)$", listed, re.MULTILINE):
        module = re.sub(r"\.x[_ǁ].*$", "", name)
        found[module][outcome] += 1
    return found


def counted(found: dict[str, Counter[str]]) -> Table:
    """Return the table of the modules and of all."""
    rows: list[list[str | float]] = []
    everything = sum(found.values(), Counter[str]())
    for module, outcomes in [*sorted(found.items()), ("all", everything)]:
        total = outcomes.total()
        noticed = outcomes["killed"] + outcomes["timeout"]
        left = total - noticed
        row = [
            module,
            total,
            outcomes["killed"],
            outcomes["timeout"],
            left,
            noticed / max(1, total),
        ]
        rows.append(row)
    columns = [Column("module"), *(Column(name, "fixed:0") for name in COUNTS)]
    return Table("modules", "Mutants by module", [*columns, Column("noticed", "percent:1")], rows)


def risen(table: Table, recorded: Path) -> list[str]:
    """Return a line for each module with more survivors than a result has recorded."""
    known = {}
    for row in json.loads(recorded.read_text())["tables"][0]["rows"]:
        known[row[0]] = row[4]
    lines = []
    for module, *_, survived, _ in table.rows:
        if survived > known.get(module, 0) and module != "all":
            lines.append(f"{module}: {survived} survive, {known.get(module, 0)} are recorded")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants to test, for example of a module")
    parser.add_argument("--minutes", type=float, default=60, help="after which to stop")
    add_keep_option(parser, "mutants")
    given = parser.parse_args()
    run(given.minutes, given.names)
    results = [MUTMUT, "results", "--all", "true"]
    listed = subprocess.run(results, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = outcomes_by_module(listed)
    untested = sum(outcomes.pop(UNKNOWN, 0) for outcomes in found.values())
    found = {name: outcomes for name, outcomes in found.items() if outcomes}
    if untested or not found:
        print(f"{untested} mutants were not tested; run this again to continue. So far:")
    table = counted(found)
    print(text_of(table), *(lines := risen(table, RESULTS / "mutants.json")), sep="\n")
    write_result("mutants", [table], given.keep, command="python tests/mutants.py")
    raise SystemExit(1 if lines else 0)


if __name__ == "__main__":
    main()
