"""Mutation testing: how results are counted, and what is mutated; the run itself is a command."""

import json
import tomllib

from benchmarks.render import ROOT
from tests.mutants import counted, outcomes_by_module, risen

LISTED = """
    specheads.theory.rates.x_rate__mutmut_1: killed
    specheads.theory.rates.x_rate__mutmut_2: timeout
    specheads.theory.rates.xǁRateǁstep__mutmut_1: survived
    specheads.theory.rates.x_rate__mutmut_3: no tests
    specheads.heads.xǁHeadǁ__init____mutmut_12: killed
"""


def test_mutants_are_counted_by_module_and_more_survivors_are_told(tmp_path):
    table = counted(outcomes_by_module(LISTED))
    assert table.rows == [
        ["heads", 1, 1, 0, 0, 1.0],
        ["theory.rates", 4, 1, 1, 2, 0.5],
        ["all", 5, 2, 1, 2, 0.6],
    ]
    recorded = tmp_path / "mutants.json"
    for survived, expected in ((2, []), (1, ["theory.rates: 2 survive, 1 are recorded"])):
        rows = [["theory.rates", 9, 8, 0, survived, 0.9]]
        recorded.write_text(json.dumps({"tables": [{"rows": rows}]}))
        assert risen(table, recorded) == expected


def test_what_is_mutated_and_its_tests_exist():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    for key in ("only_mutate", "pytest_add_cli_args_test_selection", "also_copy"):
        for pattern in settings[key]:
            assert list(ROOT.glob(pattern)), pattern
