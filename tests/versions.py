"""Run a part of the tests with the oldest, the pinned and the newest packages.

    python tests/versions.py oldest=python3.11 pinned=python3.11 newest=python3.12

Every environment is made from nothing in a folder of its own, which is removed. `oldest` has the
lower bounds of pyproject.toml and the newest of what has none, `pinned` constraints.txt, `newest`
whatever pip chooses without them. Rows of other environments stay in the result as long as the code
is the same.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import RESULTS, ROOT
from benchmarks.results import COMMIT, Column, Table, add_keep_option, text_of, write_result

SHOWN = ("torch", "transformers", "lightning", "hydra-core", "pydantic")
PARTS = (
    # The verbs, and every way to decode with a head, from an installed wheel
    "tests/integrations/test_wheel.py",
    "tests/integrations/test_transformers.py",
    "tests/decoding/test_families.py",
    "tests/decoding/test_greedy_nano.py",
    "tests/decoding/stopping",
    "tests/heads",
    "tests/training/test_trainer.py",
    "tests/training/test_checkpoints.py",
    "tests/training/distill/test_distillation.py",
    "tests/commands/test_help.py",
)
COLUMNS = [Column(name) for name in ("packages", "Python", *SHOWN)]
COLUMNS += [Column(name, "fixed:0") for name in ("passed", "failed")]
TESTS_RAN = (0, 1)  # exit codes of pytest: all passed, some failed


def lower_bounds() -> list[str]:
    """Return the requirements of pyproject.toml that name a version, at that version."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    matches = [re.match(r"([\w-]+)>=([\d.]+)", each) for each in listed]
    return [f"{match[1]}=={match[2]}" for match in matches if match]


def constraints(kind: str, folder: Path) -> list[str]:
    """Return the words for pip that decide the versions of an environment."""
    if kind == "pinned":
        return ["-c", str(ROOT / "constraints.txt")]
    if kind == "oldest":
        file = folder / "oldest.txt"
        file.write_text("".join(f"{each}\n" for each in lower_bounds()))
        return ["-c", str(file)]
    return []


def measured(kind: str, python: str) -> list[Any]:
    """Make an environment, run the tests in it, and return a row.

    Raises RuntimeError if the tests do not run.
    """
    with tempfile.TemporaryDirectory(prefix="specheads-versions-") as name:
        folder = Path(name)
        subprocess.run([python, "-m", "venv", folder / "env"], check=True)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables["OMP_NUM_THREADS"] = "1"

        def run(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
            command = [str(folder / "env" / "bin" / "python"), *words]
            return subprocess.run(
                command, cwd=ROOT, env=variables, capture_output=True, text=True, check=check
            )

        run("-m", "pip", "install", "-q", "-e", f"{ROOT}[test]", *constraints(kind, folder))
        listed = json.loads(run("-m", "pip", "list", "--format", "json").stdout)
        versions = {each["name"].lower(): each["version"] for each in listed}
        done = run("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *PARTS, check=False)
        printed = run("-c", "import platform; print(platform.python_version())").stdout
        number = printed.strip()
    print(done.stdout[-6000:], file=sys.stderr)
    if done.returncode not in TESTS_RAN:
        raise RuntimeError(
            f"{kind} on Python {number}: pytest ended with"
            f" {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    last = done.stdout.splitlines()[-1]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return [kind, number, *(versions[name] for name in SHOWN), counts["passed"], failed]


def environment(word: str) -> tuple[str, str]:
    """Return the kind of packages and the interpreter that a word of the command line names."""
    kind, _, python = word.partition("=")
    if kind not in ("oldest", "pinned", "newest"):
        raise argparse.ArgumentTypeError(
            f"{word!r} must be oldest, pinned or newest, then = and an interpreter"
        )
    return kind, python or sys.executable


def kept(keep: str | None) -> list[list[Any]]:
    """Return the rows of the result that is there, if the same code made them."""
    path = RESULTS / f"{keep}.json"
    result = json.loads(path.read_text()) if path.exists() else None
    return result["tables"][0]["rows"] if result and result["commit"] == COMMIT else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "environments", nargs="+", type=environment, metavar="{oldest,pinned,newest}=INTERPRETER"
    )
    add_keep_option(parser, "versions")
    given = parser.parse_args()
    rows = kept(given.keep)
    for each in given.environments:
        row = measured(*each)
        rows = [other for other in rows if other[:2] != row[:2]] + [row]
        table = Table("environments", "Parts of the tests, by environment", COLUMNS, rows)
        words = [f"{kind}=python{number.rpartition('.')[0]}" for kind, number, *_ in rows]
        command = shlex.join(["python", "tests/versions.py", *words])
        write_result("versions", [table], command=command, keep=given.keep)
    print(text_of(table))


if __name__ == "__main__":
    main()
