"""An evaluation as a call of the library: no config, no command line."""

import json
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from fakes import FewPrompts
from hydra.utils import instantiate
from jsonschema import Draft202012Validator

import specheads
from specheads import AcceptanceHead, HeadConfig, UserError, stopping
from specheads.commands.compose import command_config
from specheads.commands.evaluate import rule_choices
from specheads.commands.generate import rule_of
from specheads.decoding.verification import BlockVerification
from specheads.evaluation import assembly, presentation
from specheads.evaluation import evaluate as evaluation
from specheads.evaluation.answer import fastest_by_kind, winners_at
from specheads.evaluation.candidates import CostTable, RuleChoice, candidates
from specheads.evaluation.keys import MEASURED, Kind, RecordingSettings
from specheads.evaluation.page import figures
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.replayed_sets import Results
from specheads.evaluation.report import Answer, ComparedSetting, Comparison, Evidence, LiveRow
from specheads.evaluation.settings import Evaluation
from specheads.pair.sampling import Warp
from specheads.replay.intervals import Interval
from specheads.storage.files import write_json
from specheads.storage.runs import STATE

SMALL = {
    "num_prompts": 4,
    "num_dev_prompts": 3,
    "max_new_tokens": 8,
    "fixed_lengths": (1, 3),
    "thresholds": (0.4, "auto"),
    "timing_seconds": 0.5,
}


@pytest.fixture
def call(small_pair, tmp_path):
    """A function that evaluates a head, or none, with some settings."""
    torch.manual_seed(0)
    head = (
        AcceptanceHead(HeadConfig(small_pair.draft_lm.hidden_size, 0)).eval().requires_grad_(False)
    )
    torch.nn.init.normal_(head.readout.weight)

    def run(with_head=True, **values):
        settings = Evaluation(**SMALL | {"record": RecordingSettings(num_samples=2)} | values)
        heads = {"mine": head} if with_head else {}
        data = PromptData(FewPrompts())
        return evaluation.evaluate(
            small_pair, heads, settings, data, (tmp_path / "data", tmp_path / "run")
        )

    return run


def validate(report, folder):
    """Check a report's file against its schema."""
    *_, written = presentation.write_report(report, folder / "written")
    schema = presentation.Path(presentation.__file__).parent / "report.schema.json"
    content = json.loads((written.parent / "report.json").read_text())
    Draft202012Validator(json.loads(schema.read_text())).validate(content)


def test_rules_are_replayed_without_a_config(call, tmp_path):
    report = call(live="none")
    assert [(data.name, data.role, data.num_prompts) for data in report.data_sets] == [
        ("nano, dev", "dev", 3),
        ("nano", "test", 4),
    ]
    families = {row.family for row in report.data_sets[1].rules}
    assert families == {
        "fixed_length",
        "head_threshold",
        "head_threshold auto",
        "ceiling",
        "oracle",
    }
    assert report.context["heads"] == ["<mine>"] and "num_prompts: 4" in report.context["config"]
    assert report.context["draft_reads"] == []
    validate(report, tmp_path)
    assert call(live="none").data_sets == report.data_sets


OWN_RULE = """
from specheads.decoding.stopping.survival import HeadRule


class Doubtful(HeadRule):
    def __init__(self, head, threshold, max_tokens=6):
        super().__init__(head, threshold, 1, max_tokens)
        self.compile_key = ("doubtful", head)

    def acceptance(self, state, features):
        return super().acceptance(state, features) ** 2
"""


def test_a_rule_of_the_user_that_asks_a_head_is_told_as_one_with_a_head(
    call, tmp_path, monkeypatch
):
    """Neither its file nor its name is known to the package: a class and the content of a YAML file
    decide.
    """
    (tmp_path / "own_rules.py").write_text(OWN_RULE)
    monkeypatch.syspath_prepend(tmp_path)
    written = (
        "doubtful: {_target_: own_rules.Doubtful, threshold: [0.3, 0.6]}\nfixed_length:"
        " {num_tokens: [1, 3]}"
    )
    content = yaml.safe_load(written)
    content["fixed_length"]["_target_"] = "specheads.decoding.stopping.FixedLength"
    report = call(stopping=rule_choices(content), num_live_prompts=2, warp=Warp(0))
    rows = [row for row in report.data_sets[1].rules if row.rule_name == "doubtful"]
    assert [(row.head, row.bound, row.name) for row in rows] == [
        ("mine", False, f"doubtful(threshold={t})") for t in (0.3, 0.6)
    ]
    winners = winners_at(report.data_sets[1], "10")
    fastest = fastest_by_kind(winners)
    assert fastest[Kind.HEAD].rule_name == "doubtful" and Kind.HEADLESS not in fastest
    assert report.answer.comparison.choices[Kind.HEAD].name.startswith("doubtful(")
    assert [row.head for row in report.live] == [None, None, "mine"]
    drawn = {
        trace.name: trace.marker.color for trace in figures.figures_of(report)["pareto"]["1"].data
    }
    assert drawn["doubtful"] == figures.RED


def test_the_recording_decides_at_timed_steps_and_the_best_rules_are_decoded(call, tmp_path):
    """Also on prompts that are too few for any doubt to be told from chance."""
    report = call(num_live_prompts=2)
    plain = [row for row in report.live if row.verification is None]
    block = [row for row in report.live if row.verification is not None]
    assert [row.family.split()[0] for row in plain] == ["target", "fixed_length", "head_threshold"]
    assert [row.same_rule for row in block] == [row.name for row in plain if row.family != "target"]
    assert all(row.family == "block" and row.lossless for row in block)
    assert all(row.replayed_tokens_per_second for row in plain[1:])
    assert report.doubts == report.answer.doubts and report.answer.comparison.ratio == MEASURED
    assert report.ratio.low <= report.ratio.value == report.costs.ratio <= report.ratio.high
    assert report.costs.round_seconds >= 0 and report.steps.rules["HeadThreshold of mine"] >= 0
    assert report.answer.evidence.ratio == report.ratio
    assert report.answer.evidence.num_prompts == report.data_sets[1].num_prompts
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"step-times.jsonl", "overheads.jsonl", "generations.jsonl"} <= kept
    validate(report, tmp_path)


def test_a_resumed_run_chooses_by_the_steps_that_it_timed(call, tmp_path):
    """And decodes nothing again."""
    first = call(num_live_prompts=2, warp=Warp(0))
    assert all(row.verification is None for row in first.live)  # nothing is gained there
    write_json(tmp_path / "run" / STATE, {"resumed": True})
    again = call(num_live_prompts=2, warp=Warp(0))
    assert again.live == first.live and again.steps == first.steps


def typed_config(command):
    """The config of a command line that a report shows."""
    verb, *words = shlex.split(command)[1:]
    assert verb == "generate"
    return command_config(verb, ["model=nano", "paths.run=run", *words])


LOGISTIC = {
    "weights": {"logit_max_prob": 0.5, "bias": -0.25},
    "threshold": [0.3],
    "min_tokens": 1,
    "max_tokens": 9,
}


def faster_under_block(name):
    """The row of a rule that decodes faster under block verification."""
    one = Interval(1, 1, 1)
    return LiveRow(
        f"{name} verification=block", "block", one, one, one, one, 1.0, None, {}, None, True,
        verification="block", same_rule=name, over_same_rule=Interval(1.1, 1.05, 1.2),
    )  # fmt: skip


TYPED = {
    "fixed_length": RuleChoice(stopping.FixedLength, {"num_tokens": [3]}),
    "logistic": RuleChoice(stopping.Logistic, LOGISTIC),
    "confidence": RuleChoice(stopping.Confidence, {"threshold": [0.4], "max_tokens": 7}),
    "head_threshold": RuleChoice(
        stopping.HeadThreshold, {"threshold": [0.6], "min_tokens": None, "max_tokens": 20}
    ),
}


def answer_named(name):
    """An answer that names a setting."""
    one = Interval(1, 1, 1)
    choices = {Kind.FIXED: ComparedSetting(name, one, None)}
    evidence = Evidence(
        method="replay",
        prompts="some",
        split=None,
        num_prompts=1,
        num_dev_prompts=1,
        machine="any",
        costs="counted",
        ratio=None,
    )
    comparison = Comparison("10", Kind.FIXED, choices, Kind.FIXED)
    return Answer(name, Kind.FIXED, one, None, False, comparison, evidence)


@pytest.mark.parametrize("name", TYPED)
def test_the_command_and_the_python_of_a_report_make_the_setting_to_use(name):
    head = AcceptanceHead(HeadConfig(8, 0))
    (rule,) = candidates({name: TYPED[name]}, {"mine": head}, None)
    answer = answer_named(rule.name)
    pair = SimpleNamespace(name="nano", target_id="embedded:nano/target")
    settings = Evaluation(warp=Warp(0))
    setup = SimpleNamespace(
        settings=settings, pair=pair, located_heads={"mine": SimpleNamespace(where="heads/mine")}
    )
    results = Results([rule], CostTable({}))
    found = assembly._with_code(setup, results, answer, "specheads generate")
    typed = typed_config(found.command)
    assert typed.head == ("heads/mine" if name == "head_threshold" else None)
    by_command = rule_of(typed, head)
    assert by_command.compile_key == rule.live.compile_key
    assert vars(by_command) == vars(rule.live)
    made = eval(
        found.python.split("rule = ")[1].split("\n")[0], {"specheads": specheads, "head": head}
    )
    assert type(made) is type(rule.live) and made.compile_key == rule.live.compile_key
    assert vars(made) == vars(rule.live)
    faster = replace(answer, under_verification=faster_under_block(rule.name))
    found = assembly._with_code(setup, results, faster, "specheads generate")
    under_block = typed_config(found.command)
    assert isinstance(instantiate(under_block.verification), BlockVerification)
    assert "BlockVerification()" in found.python


def test_a_draft_of_which_nothing_is_accepted_gets_the_lowest_threshold(call, small_pair):
    for weight in small_pair.draft.parameters():
        weight.normal_(generator=torch.Generator().manual_seed(7))
    report = call(live="none", warp=Warp(0))
    rows = [row for row in report.data_sets[1].rules if row.family == "head_threshold auto"]
    assert rows and {row.parameters["threshold"] for row in rows} == {0.02}


def test_without_a_head_rules_need_none(call):
    report = call(with_head=False, live="none")
    assert {row.family for row in report.data_sets[1].rules} == {
        "fixed_length",
        "ceiling",
        "oracle",
    }


def test_rules_that_cannot_be_replayed_must_be_decoded(call):
    with pytest.raises(
        UserError, match="live=none, but autoregressive drafts under .* can only be decoded"
    ):
        call(verification=BlockVerification(), live="none")
    report = call(verification=BlockVerification(), num_live_prompts=2)
    assert [row.name for row in report.live] == [
        "target alone",
        "fixed_length(num_tokens=1)",
        "fixed_length(num_tokens=3)",
        "head_threshold(threshold=0.4, max_tokens=20)",
    ]
    assert not report.data_sets and replace(report, live=[]).live == []
