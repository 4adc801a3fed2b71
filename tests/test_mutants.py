"""Mutation testing: what is kept of it, and how it is counted.

The run itself is a command, tests/mutants.py.
"""

import tomllib
from fnmatch import fnmatch

import pytest
import yaml

from benchmarks.render import ROOT
from tests import mutants
from tests.mutants import Mutant, counted, explained

NAMES = ["rates.x_rate__mutmut_1", "rates.x_rate__mutmut_2", "rates.xǁRateǁstep__mutmut_1"]


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """Stand-ins for mutmut and for the reasons; returns the file of the reasons."""
    lines = {
        "rates.x_rate__mutmut_1": "    return a - b",
        "rates.x_rate__mutmut_2": "    return a - b",
    }
    monkeypatch.setattr(mutants, "REASONS", tmp_path / "reasons.yaml")
    monkeypatch.setattr(
        mutants,
        "mutmut",
        lambda verb, name: (
            f"# {name}: survived\n--- specheads/rates.py\n+++ specheads/rates.py\n@@ -1,2 +1,2 @@\n"
            " def rate(a, b):\n-    return a +"
            f" b\n+{lines.get(name.removeprefix('specheads.'), '    self.count = None')}\n"
        ),
    )
    return tmp_path / "reasons.yaml"


def survivors():
    return [Mutant(f"specheads.{name}", "survived") for name in NAMES]


def test_mutants_are_counted_by_module():
    outcomes = ["killed", "killed", "timeout", "survived", "no tests"]
    found = [
        Mutant(f"specheads.theory.rates.x_rate__mutmut_{number}", outcome)
        for number, outcome in enumerate(outcomes)
    ]
    found.append(Mutant("specheads.heads.xǁHeadǁ__init____mutmut_1", "killed"))
    rows = [
        ["heads", 1, 1, 0, 0, 1.0],
        ["theory.rates", 5, 2, 1, 2, 0.6],
        ["all", 6, 3, 1, 2, 4 / 6],
    ]
    assert counted(found).rows == rows


def test_survivors_need_a_reason_and_reasons_a_survivor(shown):
    group = {"module": "rates", "lines": ["return a - b"], "why": "b is 0"}
    shown.write_text(yaml.safe_dump([group]))
    table, complaints = explained(survivors())
    assert [row[1:] for row in table.rows] == [
        ["`return a - b`", 2, "b is 0"],
        ["`self.count = None`", 1, ""],
    ]
    assert complaints == ["no test notices, in rates: self.count = None"]
    shown.write_text(
        yaml.safe_dump(
            [
                group,
                {
                    "module": "rates",
                    "lines": ["self.count = None", "return b"],
                    "why": "it is unread",
                },
            ]
        )
    )
    table, complaints = explained(survivors())
    assert all(row[3] for row in table.rows) and complaints == [
        "a test does notice, in rates: return b"
    ]


def test_results_are_read_as_mutmut_prints_them(monkeypatch):
    text = (
        "    specheads.theory.rates.x_rate__mutmut_1: killed\n   "
        " specheads.heads.xǁHeadǁstep__mutmut_12: no tests\n"
    )
    monkeypatch.setattr(mutants, "mutmut", lambda *words: text)
    assert [(each.module, each.outcome) for each in mutants.mutants()] == [
        ("theory.rates", "killed"),
        ("heads", "no tests"),
    ]


def test_reasons_are_given_once_for_modules_that_are_mutated():
    chosen = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]["only_mutate"]
    groups = yaml.safe_load(mutants.REASONS.read_text())
    for group in groups:
        path = f"specheads/{group['module'].replace('.', '/')}.py"
        assert (
            (ROOT / path).is_file()
            and any(fnmatch(path, pattern) for pattern in chosen)
            and group["why"]
        )
    lines = [(group["module"], line) for group in groups for line in group["lines"]]
    assert len({*lines}) == len(lines)


def test_what_is_mutated_and_its_tests_exist():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    for key in ("only_mutate", "pytest_add_cli_args_test_selection", "also_copy"):
        assert settings[key] and all(any(ROOT.glob(each)) for each in settings[key])
