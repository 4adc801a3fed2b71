"""Which small changes of the code the tests notice: mutation testing with mutmut.

    pip install 'mutmut>=3.8' && python tests/mutants.py [--minutes 8] [--survivors]

`[tool.mutmut]` in pyproject.toml names the modules that are changed, and the tests; each mutant is
given those that call its function. mutmut keeps what it found in mutants/, so a run that ends early
goes on where it was, and later ones test only functions that have changed. `--survivors` also tries
survivors again, for example after tests were added; for a run from nothing remove mutants/.
Decorated functions (properties), values of modules and classes, and lines that log are not mutated,
nor are functions with `# pragma: no mutate block`, whose tests take many seconds. What a test
module makes while it is imported, or in a fixture that its tests share, is made without the mutant
or counts for the first test alone: tests that are to notice changes of a function call it
themselves.

tests/survivors.yaml says why a change that no test notices is harmless. One without a reason makes
the exit code 1.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import ROOT
from benchmarks.results import Column, Table, add_keep_option, text_of, write_result

REASONS = Path(__file__).with_name("survivors.yaml")
MUTMUT = str(Path(sys.executable).with_name("mutmut"))
NOTICED = ("killed", "timeout")
UNKNOWN = "not checked"


@dataclass(frozen=True)
class Mutant:
    """A changed function, and how its tests ended."""

    name: str  # mutmut's: module, function and a number
    outcome: str

    @property
    def module(self) -> str:
        """Its module, below specheads."""
        return re.sub(r"^specheads\.|\.x[_ǁ].*$", "", self.name)

    def line(self) -> str:
        """Return the line that differs."""
        lines = mutmut("show", self.name).splitlines()
        return next(line[1:].strip() for line in lines if re.match(r"\+(?!\+\+ )", line))


def mutmut(*words: str) -> str:
    """Return what a command of mutmut prints."""
    return subprocess.run(
        [MUTMUT, *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def run(minutes: float, names: list[str]) -> None:
    """Test the mutants that were not tested yet, or those of `names` again, for at most so many
    minutes.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": f"-p tests.fastest_first {os.environ.get('PYTEST_ADDOPTS', '')}",
    }
    process = subprocess.Popen(
        [MUTMUT, "run", "--max-children", "2", *names], cwd=ROOT, env=environment
    )
    try:
        code = process.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # what was found so far is kept
        process.wait()
        return
    if code:
        raise SystemExit(code)


def mutants() -> list[Mutant]:
    """Return all mutants, with what is known of them."""
    return [
        Mutant(*match)
        for match in re.findall(
            r"^ *(specheads\S+): (.+)$", mutmut("results", "--all", "true"), re.MULTILINE
        )
    ]


def counted(found: list[Mutant]) -> Table:
    """Return how many mutants of each module the tests notice."""
    columns = [
        Column("module"),
        *(Column(name, "fixed:0") for name in ("mutants", "killed", "timed out", "survived")),
    ]
    rows = []
    for module in [*sorted({mutant.module for mutant in found}), "all"]:
        outcomes = Counter(mutant.outcome for mutant in found if module in (mutant.module, "all"))
        total = outcomes.total()
        noticed = sum(outcomes[name] for name in NOTICED)
        rows.append(
            [
                module,
                total,
                outcomes["killed"],
                outcomes["timeout"],
                total - noticed,
                noticed / total,
            ]
        )
    return Table("modules", "Mutants by module", [*columns, Column("noticed", "percent:1")], rows)


def explained(survivors: list[Mutant]) -> tuple[Table, list[str]]:
    """Return the survivors with their reasons, and complaints: survivors without a reason, reasons
    without a survivor.
    """
    reasons = {
        (group["module"], line): group["why"]
        for group in yaml.safe_load(REASONS.read_text())
        for line in group["lines"]
    }
    changes = Counter((mutant.module, mutant.line()) for mutant in survivors)
    rows = [
        [module, f"`{line}`", count, reasons.get((module, line), "")]
        for (module, line), count in sorted(changes.items())
    ]
    complaints = [
        f"no test notices, in {module}: {line}" for module, line in changes.keys() - reasons.keys()
    ]
    complaints += [
        f"a test does notice, in {module}: {line}"
        for module, line in reasons.keys() - changes.keys()
    ]
    columns = [
        Column("module"),
        Column("changed line"),
        Column("mutants", "fixed:0"),
        Column("why no test needs to notice it"),
    ]
    return Table("survivors", "Changes that no test notices", columns, rows), sorted(complaints)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=60, help="after which to stop; the next run goes on there"
    )
    parser.add_argument("--survivors", action="store_true", help="also try survivors again")
    add_keep_option(parser, "mutants")
    given = parser.parse_args()
    again = (
        [mutant.name for mutant in mutants() if mutant.outcome not in NOTICED]
        if given.survivors
        else []
    )
    run(given.minutes, again)
    found = mutants()
    if left := sum(mutant.outcome == UNKNOWN for mutant in found):
        raise SystemExit(f"{left} of {len(found)} mutants are left; run this again to go on.")
    modules = counted(found)
    (survivors, complaints) = explained([each for each in found if each.outcome not in NOTICED])
    write_result(
        "mutants",
        [modules, survivors],
        command="python tests/mutants.py",
        seeds=[],
        keep=given.keep,
    )
    print(text_of(modules), *complaints, sep="\n")
    raise SystemExit(1 if complaints else 0)


if __name__ == "__main__":
    main()
