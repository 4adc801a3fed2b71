"""An evaluation as a call of the library: no config, no command line."""

import json
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from fakes import FewPrompts
from jsonschema import Draft202012Validator

import specheads
from specheads import AcceptanceHead, HeadConfig, UserError, stopping
from specheads.commands.compose import command_config
from specheads.commands.evaluate import evaluation_settings, rule_choices
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.stopping import FixedLength
from specheads.decoding.verification import BlockVerification
from specheads.evaluation import conclusions, decode, reporting
from specheads.evaluation import evaluate as evaluation
from specheads.evaluation.candidates import Candidate, RuleChoice, candidates
from specheads.evaluation.page import figures
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.replayed_sets import Outcome
from specheads.evaluation.report import COUNTED, MEASURED, STEPS, Answer, Choice, Kind, Verdict
from specheads.evaluation.settings import Evaluation, RecordingSettings
from specheads.evaluation.sweep import sweep_settings
from specheads.pair.sampling import Warp
from specheads.replay.intervals import Interval

SMALL = {
    "num_prompts": 4,
    "num_dev_prompts": 3,
    "max_new_tokens": 8,
    "fixed_lengths": (1, 3),
    "thresholds": (0.4, "auto"),
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
    *_, written = reporting.write_report(report, tmp_path / "written")
    schema = json.loads(
        (reporting.Path(reporting.__file__).parent / "report.schema.json").read_text()
    )
    Draft202012Validator(schema).validate(json.loads((written.parent / "report.json").read_text()))
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
    winners = conclusions.winners_at(report.data_sets[1], "10")
    fastest = conclusions.fastest_by_kind(winners)
    assert fastest[Kind.HEAD].rule_name == "doubtful" and Kind.HEADLESS not in fastest
    trusted = replace(report, doubts=[])
    assert (
        conclusions.verdict_of(trusted, {}).answer.choices[Kind.HEAD].name.startswith("doubtful(")
    )
    assert [row.head for row in report.live] == [None, None, "mine"]
    drawn = {
        trace.name: trace.marker.color for trace in figures.figures_of(report)["pareto"]["1"].data
    }
    assert drawn["doubtful"] == figures.RED


def test_the_best_rules_are_decoded_and_their_counts_are_kept(call, tmp_path):
    report = call(num_live_prompts=2)
    assert [row.family.split()[0] for row in report.live][:2] == ["target", "fixed_length"]
    assert report.live[1].replayed_tokens_per_second
    journals = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"costs.jsonl", "generations.jsonl"} <= journals
    assert "dev-trial.jsonl" not in journals  # three dev prompts choose nothing
    assert {row.dev_speedup for row in report.live} == {None}
    assert report.doubts  # of two prompts


def test_a_rule_that_was_fitted_again_is_still_compared_with_the_replay_of_the_one_decoded(
    call, monkeypatch
):
    """StepCosts that change between the probe and the decoding change automatic values, but not
    what was decoded.
    """
    draft_seconds = iter((0.1, 0.4))  # measured by the probe, and with the decoded rules

    def measured_costs(setup, measured):
        table = setup.counted_costs()
        return replace(
            table, costs={MEASURED: StepCosts(next(draft_seconds), 1.0), **table.costs}, alone=1.0
        )

    for module in (evaluation, decode):
        monkeypatch.setattr(module, "measured_costs", measured_costs)
    monkeypatch.setattr(decode, "MOST_TURNS", 1)
    report = call(num_live_prompts=2, thresholds=("auto", 0.01))
    refitted = [
        row.name
        for row in report.data_sets[1].rules
        if row.family == "head_threshold auto" and MEASURED in row.speedup
    ]
    _, *plain = (row for row in report.live if row.verification is None)
    assert plain[-1].family == "head_threshold auto" and plain[-1].name not in refitted
    assert all(row.replayed_tokens_per_second for row in plain)


def test_chosen_rules_are_decoded_under_block_verification_and_dev_prompts_decide(
    call, monkeypatch
):
    asked = []

    def speeds(setup, outcome):
        asked.extend(decoded.setting.name for decoded in outcome.measured)
        return {name: np.full(9, 1.0 + name.endswith("verification=block")) for name in asked}

    monkeypatch.setattr(evaluation, "tried_on_dev", speeds)
    monkeypatch.setattr(decode, "doubts_of", lambda *given: [])
    report = call(num_live_prompts=2)
    _, *drafting = (row for row in report.live if row.verification is None)
    block = [row for row in report.live if row.verification is not None]
    assert [row.name for row in block] == [f"{row.name} verification=block" for row in drafting]
    assert all(row.family == "block" and row.lossless for row in block)
    assert asked == [row.name for row in report.live] and report.verdict.answer.ratio == MEASURED
    answer = report.verdict.answer
    assert (
        answer.choices[answer.use].name == block[0].name
        and "BlockVerification()" in report.verdict.python
    )
    settings = typed_settings(report.verdict.command)
    assert isinstance(settings.verification, BlockVerification) and settings.head is None
    length = int(block[0].name.split("=")[1].split(")")[0])
    assert settings.rules["fixed_length"].arguments == {
        "num_tokens": [2 * length, length]
    }  # two lengths tell costs apart


def typed_settings(command):
    """The settings of a command line that a report shows."""
    verb, *words = shlex.split(command)[1:]
    return evaluation_settings(command_config(verb, ["model=nano", "paths.run=run", *words]))


LOGISTIC = {
    "weights": {"logit_max_prob": 0.5, "bias": -0.25},
    "threshold": [0.3],
    "min_tokens": 1,
    "max_tokens": 9,
}
TYPED = {
    "fixed_length": RuleChoice(stopping.FixedLength, {"num_tokens": [3]}),
    "logistic": RuleChoice(stopping.Logistic, LOGISTIC),
    "confidence": RuleChoice(stopping.Confidence, {"threshold": [0.4], "max_tokens": 7}),
    "head_threshold": RuleChoice(
        stopping.HeadThreshold, {"threshold": [0.6], "min_tokens": None, "max_tokens": 20}
    ),
}


@pytest.mark.parametrize("name", TYPED)
def test_the_command_and_the_python_of_a_report_make_the_setting_to_use(name):
    head = AcceptanceHead(HeadConfig(8, 0))
    (rule,) = candidates({name: TYPED[name]}, {"mine": head}, None)
    choice = Choice(rule.name, Interval(1, 1, 1), None)
    verdict = Verdict(Answer("10", Kind.FIXED, {Kind.FIXED: choice}, None), [], [], "", None)
    pair = SimpleNamespace(name="nano", target_id="embedded:nano/target")
    settings = Evaluation(warp=Warp(0))
    setup = SimpleNamespace(
        settings=settings, pair=pair, located_heads={"mine": SimpleNamespace(where="heads/mine")}
    )
    found = reporting._with_code(setup, Outcome([rule], None), verdict, "specheads evaluate")
    typed = typed_settings(found.command)
    given = {key: value for key, value in typed.rules[name].arguments.items() if value is not None}
    assert given == {key: value for key, value in rule.arguments.items() if value is not None}
    assert typed.head == ("heads/mine" if name == "head_threshold" else None)
    made = eval(
        found.python.split("rule = ")[1].split("\n")[0], {"specheads": specheads, "head": head}
    )
    assert type(made) is type(rule.live) and made.compile_key == rule.live.compile_key
    assert vars(made) == vars(rule.live)


def test_greedy_drafts_are_not_decoded_under_block_verification(call):
    report = call(num_live_prompts=2, warp=Warp(0))
    assert all(row.verification is None for row in report.live)


def test_a_draft_of_which_nothing_is_accepted_gets_the_lowest_threshold(call, small_pair):
    for weight in small_pair.draft.parameters():
        weight.normal_(generator=torch.Generator().manual_seed(7))
    report = call(live="none", warp=Warp(0))
    rows = [row for row in report.data_sets[1].rules if row.family == "head_threshold auto"]
    assert rows and {row.parameters["threshold"] for row in rows} == {0.02}


def test_the_trial_decodes_dev_prompts_by_all_lossless_rules(call, monkeypatch, nano, tmp_path):
    monkeypatch.setattr(decode, "FEWEST_GROUPS", 3)
    monkeypatch.setattr(decode, "doubts_of", lambda *given: [])
    report = call(num_live_prompts=2)
    header, *rows = (tmp_path / "run" / "dev-trial.jsonl").read_text().splitlines()
    dev = [
        nano.encode_instruction(prompt.text)
        for prompt in FewPrompts().load(False)
        if prompt.split == "dev"
    ][:3]
    assert json.loads(header)["provenance"]["prompts"] == dev and len(rows) == 3
    assert {choice.name for choice in report.verdict.answer.choices.values()} <= {
        row.name for row in report.live if row.lossless
    }
    assert all(row.dev_speedup > 0 and row.gain for row in report.live if row.lossless)
    assert len(json.loads(rows[0])["entry"]["stats"]) == len(report.live)


def test_with_doubts_the_answer_stands_on_steps_that_were_timed_and_nothing_is_tried(
    call, monkeypatch, tmp_path
):
    monkeypatch.setattr(decode, "FEWEST_GROUPS", 3)
    monkeypatch.setattr(decode, "MOST_SECONDS", 0.1)
    report = call(num_live_prompts=2)
    assert report.doubts and not (tmp_path / "run" / "dev-trial.jsonl").exists()
    assert (
        report.basis.costs in (STEPS, COUNTED)
        and len(report.basis.choices) == 3
        and report.fit.num_rounds == 0
    )
    assert (
        report.basis.ratio.low
        <= report.basis.ratio.value
        == report.costs.ratio
        <= report.basis.ratio.high
    )
    assert report.verdict.doubt and f"by {report.basis.costs}" in report.verdict.rests_on
    *_, written = reporting.write_report(report, tmp_path / "written")
    schema = json.loads(
        (reporting.Path(reporting.__file__).parent / "report.schema.json").read_text()
    )
    Draft202012Validator(schema).validate(json.loads((written.parent / "report.json").read_text()))


def test_the_counts_of_a_decoded_rule_stay_when_it_is_fitted_again():
    """Under an unchanged name, too: the seconds that a rule was fitted to are not in its name."""
    rules = [
        Candidate("online", name, FixedLength(1), FixedLength(1))
        for name in ("first", "second", "not decoded")
    ]
    outcome = Outcome(
        rules, None, [SimpleNamespace(counts=[]), SimpleNamespace(counts=[10, 20, 30])]
    )
    settings = sweep_settings(rules[:2])
    assert decode.decoded_counts(outcome, settings[:2]) == {"first": 10}
    later = replace(outcome, decoded_counts={"first": 1})
    assert decode.decoded_counts(later, settings) == {"first": 1, "second": 20}


def test_without_a_head_rules_need_none(call):
    report = call(with_head=False, live="none")
    assert {row.family for row in report.data_sets[1].rules} == {
        "fixed_length",
        "ceiling",
        "oracle",
    }


def test_a_missing_split_is_refused(call):
    with pytest.raises(UserError, match="no final prompts"):
        call(split="final")


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
