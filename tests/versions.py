"""Which versions this project runs with: a part of the tests in environments with the oldest and the newest packages.

    python tests/versions.py --pythons 3.11=python3.11 3.12=python3.12 3.13=python3.13

Every environment is made from nothing in a folder of its own, which is removed. `oldest` has the lower bounds of pyproject.toml,
`pinned` constraints.txt, `newest` whatever pip chooses without them.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import ROOT
from benchmarks.results import Column, Table, Value, add_result_option, text_of, write_result

SHOWN = ("torch", "transformers", "lightning", "hydra-core")
PARTS = ("tests/heads", "tests/decoding/stopping", "tests/integrations/test_transformers.py", "tests/test_pipeline.py")
COLUMNS = [Column("packages"), Column("Python"), *(Column(name) for name in SHOWN), Column("tests passed", "fixed:0")]
COLUMNS += [Column("failed", "fixed:0"), Column("minutes", "fixed:1")]


def lower_bounds() -> list[str]:
    """Return the requirements of pyproject.toml that name a version, at that version."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    matches = [re.match(r"([\w-]+)>=([\d.]+)", each) for each in listed]
    return [f"{match[1]}=={match[2]}" for match in matches if match]


def packages(kind: str, folder: Path) -> list[str]:
    """Return the words for pip that decide the versions of an environment."""
    if kind == "pinned":
        return ["-c", str(ROOT / "constraints.txt")]
    if kind == "oldest":
        file = folder / "oldest.txt"
        file.write_text("".join(f"{each}\n" for each in lower_bounds() if not each.startswith("pydantic")))
        return ["-c", str(file)]
    return []


def measured(kind: str, python: str) -> list[Value]:
    """Make an environment, run the tests in it, and return a row."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([python, "-m", "venv", folder / "env"], check=True)
        inside = str(folder / "env" / "bin" / "python")
        install = [inside, "-m", "pip", "install", "-q", "-e", f"{ROOT}[test]", *packages(kind, folder)]
        subprocess.run(install, check=True)
        listed = json.loads(subprocess.check_output([inside, "-m", "pip", "list", "--format", "json"]))
        versions = {each["name"].lower(): each["version"] for each in listed}
        command = [inside, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *PARTS]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        print(done.stdout[-3000:], file=sys.stderr)
        number = subprocess.check_output([inside, "-c", "import platform; print(platform.python_version())"], text=True).strip()
    last = done.stdout.strip().splitlines()[-1]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|errors?)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    minutes = (time.perf_counter() - start) / 60
    return [kind, number, *(versions[name] for name in SHOWN), counts.get("passed", 0), failed, minutes]


def environments(pythons: Sequence[str]) -> list[tuple[str, str]]:
    """Return the environments: every kind with the first interpreter, the newest packages with the others."""
    first, *others = pythons
    return [(kind, first) for kind in ("oldest", "pinned", "newest")] + [("newest", python) for python in others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", nargs="+", default=[f"here={sys.executable}"], metavar="NAME=INTERPRETER")
    add_result_option(parser, "versions")
    given = parser.parse_args()
    rows = [measured(*each) for each in environments([word.partition("=")[2] for word in given.pythons])]
    table = Table("environments", "Parts of the tests, by environment", COLUMNS, rows)
    print(text_of(table))
    write_result(given.result, [table], split=None)


if __name__ == "__main__":
    main()
