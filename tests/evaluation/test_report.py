import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import tiny_pair
from jsonschema import Draft202012Validator
from report_example import report_example
from rich.console import Console

from specheads import AcceptanceHead, HeadConfig, Warp, stopping
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import StepTimes
from specheads.evaluation import report as module
from specheads.evaluation.candidates import CostTable, RuleChoice, candidates
from specheads.evaluation.conclusions import use_text
from specheads.evaluation.presentation import print_report, write_report
from specheads.evaluation.replayed_sets import Results
from specheads.evaluation.report import Report
from specheads.evaluation.rows import live_rows
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.sweep import Sweep, sweep_settings

ROWS = ("target alone", "best fixed length", "best without training", "head")
SCHEMA = json.loads((Path(module.__file__).parent / "report.schema.json").read_text())


def rules(fixed_lengths, thresholds=()):
    fixed = {"fixed_length": RuleChoice(stopping.FixedLength, {"num_tokens": fixed_lengths})}
    head = {"head_threshold": RuleChoice(stopping.HeadThreshold, {"threshold": list(thresholds)})}
    return candidates(fixed | (head if thresholds else {}), {"mine": small_head()}, None)


def small_head():
    """A head that is about as sure of some tokens as not of others."""
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(16, 1, width=8)).eval().requires_grad_(False)
    head.readout.bias.fill_(1.5)
    return head


@pytest.fixture(scope="module")
def measured():
    settings = sweep_settings(rules([1, 3], [0.3, 0.6]))
    how = Evaluation(warp=Warp(), max_new_tokens=12, repeats=2)
    return Sweep(tiny_pair(5), how, 14).run(settings, [[0], [1, 2], [3], [4, 4]])


@pytest.fixture(scope="module")
def report(measured):
    live = live_rows(Results([], CostTable({}), measured=measured), True, range(4))
    context = {
        "model": "tiny",
        "num_live_prompts": 4,
        "verification": "token verification",
        "lossless": True,
    }
    return Report(context, StepTimes(StepCosts(0.1, 1.0)), ["The machine was busy."], live)


def test_a_row_has_the_counts_of_its_setting(measured, report):
    row = report.live[2]
    stats = measured[2].stats
    assert row.discard_rate.value == pytest.approx(sum(s.num_discarded for s in stats) / 96)
    assert row.verification_rate.value == pytest.approx(sum(s.num_target_calls for s in stats) / 96)
    assert row.discard_rate.low <= row.discard_rate.value <= row.discard_rate.high
    assert row.milliseconds["p50"] <= row.milliseconds["p90"] <= row.milliseconds["p99"]
    assert report.live[0].speedup.value == pytest.approx(1)


def test_live_rows_resample_groups(measured):
    """Where all prompts are of one file there is nothing to resample.

    Where each has its file, speeds vary.
    """
    rows, one_file = (
        live_rows(Results([], CostTable({}), measured=measured), True, groups)
        for groups in (range(4), ["a.py"] * 4)
    )
    assert all(row.tokens_per_second.low < row.tokens_per_second.high for row in rows)
    assert all(
        row.tokens_per_second.low == row.tokens_per_second.value == row.tokens_per_second.high
        for row in one_file
    )


@pytest.mark.parametrize("which", ["live", "example", "empty"])
def test_report_json_follows_its_schema(report, tmp_path, which):
    report = {
        "live": report,
        "example": report_example(),
        "empty": Report({"model": "tiny"}, None),
    }[which]
    paths = {path.name: path for path in write_report(report, tmp_path)}
    assert sorted(paths) == ["report.html", "report.json"]
    Draft202012Validator.check_schema(SCHEMA)
    validator = Draft202012Validator(SCHEMA)
    content = json.loads(paths["report.json"].read_text())
    validator.validate(content)
    assert not validator.is_valid(content | {"doubts": 1})
    assert not validator.is_valid({"context": {}})


@pytest.mark.parametrize("verbose", [True, False])
def test_the_tables_fit_80_columns_with_nothing_cut(verbose):
    console = Console(record=True, width=80)
    print_report(report_example(), console, verbose=verbose)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text


def test_the_end_is_what_to_use_in_a_screen():
    report = report_example()
    console = Console(record=True, width=100)
    print_report(report, console)
    lines = [line for line in console.export_text().splitlines() if line.strip()]
    assert (
        lines[0].startswith("Use: ")
        and lines[1] == use_text(report.answer.comparison)
        and len(lines) < 40
    )
    text = "\n".join(lines)
    for said in (
        "Timing unreliable here: the machine was <busy>.",
        *ROWS,
        "Another cost ratio changes the winner: ",
        *report.notes,
    ):
        assert " ".join(said.split()) in " ".join(text.split())


def printed(report, width=220):
    console = Console(record=True, width=width)
    print_report(report, console, verbose=True)
    return " ".join(console.export_text().split())


def test_the_tables_show_every_rule_and_what_is_counted():
    report = report_example()
    text = printed(report)
    for data in report.data_sets:
        assert (data.name in text) == (data.role == "test")
        for winner in data.winners:
            assert winner.family in text
    assert "verifying more tokens is free, heads’ costs are counted from their weights" in text
    assert "15 %" in text and "lossy" in text


def test_measured_figures_are_marked_where_they_are_unreliable():
    doubtful = printed(report_example())
    assert "as replay predicts them, unreliable" in doubtful
    trusted = printed(replace(report_example(), doubts=[]))
    assert "doubtful" not in trusted and ", unreliable" not in trusted
