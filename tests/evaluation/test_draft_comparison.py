"""Evaluations of several drafts side by side, read back from their reports."""

import json
import re
from dataclasses import replace

import pytest
from report_example import report_example
from rich.console import Console

from specheads import UserError
from specheads.evaluation.draft_comparison import check_context, compared, read_report
from specheads.evaluation.report import Report
from specheads.evaluation.report_files import print_report, write_report


@pytest.fixture(scope="module")
def report():
    return replace(report_example(), drafts=[])


@pytest.fixture(scope="module")
def earlier(report, tmp_path_factory):
    """The folder of an evaluation of another draft that is a tenth faster."""
    folder = tmp_path_factory.mktemp("earlier")
    faster = [
        replace(data, winners=[replace(row, speedup=replace(row.speedup, value=1.1 * row.speedup.value)) for row in data.winners])
        for data in report.data_sets
    ]
    write_report(replace(report, data_sets=faster, context=report.context | {"draft": "other"}), folder)
    return folder


def test_each_draft_has_a_row_for_each_kind_of_rule(report, earlier):
    rows = compared(report, {"earlier": read_report(earlier)})
    names = [report.context["draft"], "other"]
    kinds = ["fixed length", "rule without a head", "head"]
    assert [(row.draft, row.kind) for row in rows] == [(name, kind) for name in names for kind in kinds]
    winners = [row for row in report.data_sets[1].winners if row.ratio == "10"]
    for mine, theirs in zip(rows[:3], rows[3:], strict=True):
        assert theirs.speedup["10"].value == pytest.approx(1.1 * mine.speedup["10"].value)
        assert mine.rules["10"] in {row.name for row in winners} and mine.rules == theirs.rules
        assert mine.block_efficiency["10"] == next(
            row.block_efficiency for row in report.data_sets[1].rules if row.name == mine.rules["10"]
        )
    heads = [row for row in winners if row.family.startswith(("head_threshold", "expected_throughput"))]
    best = max(heads, key=lambda row: row.dev_speedup)
    assert (rows[2].rules["10"], rows[2].speedup["10"]) == (best.name, best.speedup)
    assert rows[0].tokens_per_second.value == max(
        row.tokens_per_second.value for row in report.live if row.family == "fixed_length"
    )


def test_the_comparison_is_printed_and_kept(report, earlier, tmp_path):
    console = Console(record=True, width=200)
    whole = replace(report, drafts=compared(report, {"earlier": read_report(earlier / "report.json")}))
    print_report(whole, console)
    text = console.export_text()
    assert "Drafts and what stops them, ratio 10" in text and len(re.findall("^ *other", text, re.MULTILINE)) == 2 * 3
    write_report(whole, tmp_path)
    assert len(json.loads((tmp_path / "report.json").read_text())["drafts"]) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "another"}, "its target is another, here it is meta-llama"),
        ({"warp": {"temperature": 0.0}}, "its warp is"),
        ({"max_new_tokens": 7}, "its max_new_tokens is 7"),
    ],
)
def test_other_reports_are_refused_with_both_sides(report, earlier, change, message):
    content = read_report(earlier)
    content["context"] |= change
    with pytest.raises(UserError, match=f"compare=there cannot be compared.*{message}"):
        compared(report, {"there": content})


GIVEN = {"counted": False, "head_shares": {"other": 0.05}}


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({}, {"verified_share": 0.1}, r"its costs\.verified_share is 0\.1, here it is 0\.01; evaluate both with the same"),
        ({}, GIVEN, r"its costs\.head_share is 0\.05, here it is counted \(null\)"),
        (GIVEN, {"counted": False, "head_shares": {"a": 0.2, "b": 0.2}}, r"its costs\.head_share is 0\.2, here it is 0\.05"),
    ],
)
def test_other_costs_are_refused_with_both_sides(report, earlier, ours, theirs, message):
    context, content = json.loads(json.dumps(report.context)), read_report(earlier)
    context["costs"] |= ours
    content["context"]["costs"] |= theirs
    with pytest.raises(UserError, match=f"compare=there cannot be compared.*{message}"):
        check_context(context, content, "there")


def test_costs_of_heads_may_differ_where_they_are_counted_or_there_are_none(report, earlier):
    content = read_report(earlier)
    for change in ({"head_shares": {"other": 0.3}}, {"head_shares": {}, "counted": False}):
        content["context"]["costs"] |= change
        check_context(report.context, content, "there")


@pytest.mark.parametrize("key", ["num_prompts", "num_tokens"])
def test_other_prompts_are_refused(report, earlier, key):
    content = read_report(earlier)
    content["data_sets"][1][key] = 5
    with pytest.raises(UserError, match="its test prompts .* is .*5"):
        compared(report, {"there": content})


def test_prompts_of_another_hash_are_refused_before_anything_is_recorded(report, earlier):
    content = read_report(earlier)
    content["context"]["prompts"]["mt-bench <test>"] |= {"sha256": "f" * 16, "python": "3.13.1"}
    ours = json.loads(json.dumps(report.context))
    ours["prompts"]["mt-bench <test>"]["python"] = "3.11.7"
    difference = (
        "its set of prompts is .* hash ffffffffffffffff of Python 3.13.1, here it is .* hash 0000000000000001 of Python 3.11.7"
    )
    with pytest.raises(UserError, match=f"compare=there cannot be compared.*{difference}"):
        check_context(ours, content, "there")


def test_dev_prompts_and_other_sets_may_differ(report, earlier):
    content = read_report(earlier)
    for name in ("alpaca", "gsm8k"):
        content["context"]["prompts"][name]["sha256"] = "f" * 16
    check_context(report.context, content, "there")


def test_without_replay_there_is_nothing_to_compare(earlier):
    with pytest.raises(UserError, match="compare= needs replayed rules"):
        compared(Report({}, None), {"earlier": read_report(earlier)})


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"context": {}}', '{"context": {}, "data_sets": []}'])
def test_a_folder_without_a_report_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(UserError, match=f"compare={tmp_path} holds no report"):
        read_report(tmp_path)
