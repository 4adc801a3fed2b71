"""The quality of responses on made-up likelihoods, and in evaluations of nano."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import FewPrompts
from jsonschema import Draft202012Validator
from report_example import report_example
from rich.console import Console

from specheads import papers
from specheads.evaluation import evaluate as evaluation
from specheads.evaluation import report_files
from specheads.evaluation.candidates import TARGET_ALONE, Candidate
from specheads.evaluation.intervals import resample_counts
from specheads.evaluation.live_rows import ResponseQuality, with_quality
from specheads.evaluation.page.document import html_of
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.report import LiveRow
from specheads.evaluation.report_files import print_report
from specheads.evaluation.settings import Evaluation, RecordingSettings
from specheads.evaluation.sweep import Measured
from specheads.evaluation.tables import comparisons
from specheads.prompts.data_set_source import DatasetSource

AS_THEY_ARE = np.ones((3, 4))  # no resampling


def responses(nats, lengths=None, **scores):
    nats = np.array(nats, dtype=float)
    return ResponseQuality(nats, np.ones_like(nats) if lengths is None else np.array(lengths), **scores)


def test_a_win_is_a_larger_mean_log_likelihood_and_a_tie_half():
    ours, theirs = responses([[1], [2], [3], [4]]), responses([[2], [2], [2], [5]])
    assert ours.win_rate(theirs, AS_THEY_ARE).value == (1 + 0.5 + 0 + 1) / 4
    assert theirs.win_rate(ours, AS_THEY_ARE).value == 1.5 / 4
    assert ours.win_rate(ours, AS_THEY_ARE).value == 0.5


def test_likelihoods_are_compared_per_token():
    ours = responses([[6], [6], [6], [6]], [[6], [4], [3], [2]])  # 1, 1.5, 2 and 3 nats per token
    theirs = responses([[4]] * 4, [[2]] * 4)  # 2
    assert ours.win_rate(theirs, AS_THEY_ARE).value == (1 + 1 + 0.5 + 0) / 4


def test_the_repeats_of_a_prompt_share_its_weight():
    ours, theirs = responses([[1, 9], [1, 1]]), responses([[2, 2], [2, 2]])
    assert ours.win_rate(theirs, np.ones((2, 2))).value == (0.5 + 1) / 2


def test_intervals_resample_groups():
    wins = [[1]] * 20 + [[3]] * 20  # alike in all ten prompts of a file
    ours, theirs = responses(wins * 2), responses([[2]] * 80)
    alone = ours.win_rate(theirs, resample_counts(80))
    by_file = ours.win_rate(theirs, resample_counts([f"file {number // 10}" for number in range(80)]))
    assert alone.value == by_file.value == 0.5 and by_file.high - by_file.low > 2 * (alone.high - alone.low)


def test_scores_are_means_over_prompts_with_a_reference():
    measured = [Measured(TARGET_ALONE, [SimpleNamespace(num_tokens=1, num_rejections=0)] * 4)]
    row = replace(report_example().live[1], name=TARGET_ALONE.name)
    for scores, expected in (({"scores": {0: 0.5, 2: 1.0}}, (0.5 + 1) / 2), ({}, None)):
        (made,) = with_quality([row], measured, {TARGET_ALONE.name: responses([[0, 0]] * 4, **scores)}, list("abcd"))
        assert (made.quality.score and made.quality.score.value) == expected


def test_lossy_rules_are_compared_where_drafts_stop_alike():
    four, eight = object(), object()
    settings = [TARGET_ALONE, Candidate("fixed_length", "plain", four, four)]
    settings += [Candidate(name, f"{name} {rule}", rule, rule) for name in ("opt", "uno") for rule in (four, eight)]
    stats = SimpleNamespace(num_tokens=1, num_rejections=1)
    measured = [Measured(setting, [stats]) for setting in settings]
    rows = [replace(plain_row(), name=each.name, lossless=number < 2) for number, each in enumerate(settings)]
    quality = {each.name: responses([[1.0 + number]]) for number, each in enumerate(settings)}
    target, plain, *lossy = (row.quality for row in with_quality(rows, measured, quality, ["a"]))
    assert not target.win_rates and target.rejections_per_token is None and plain.rejections_per_token.value == 1
    names = [list(row.win_rates) for row in (plain, *lossy)]
    alone = [TARGET_ALONE.name]
    assert names == [alone, alone, alone, [*alone, f"opt {four}"], [*alone, f"opt {eight}"]]
    assert all(row.win_rates[TARGET_ALONE.name].value == 0 for row in (plain, *lossy))
    assert with_quality(rows, measured, {}, ["a"]) == rows


def plain_row() -> LiveRow:
    return report_example().live[1]


SMALL = {"num_prompts": 4, "num_dev_prompts": 3, "num_live_prompts": 4, "max_new_tokens": 8, "fixed_lengths": (1, 3)}
SCHEMA = json.loads((Path(report_files.__file__).parent / "report.schema.json").read_text())


@pytest.fixture
def call(nano, tmp_path):
    """A function that evaluates nano without a head."""

    def run(source=None, **values):
        settings = Evaluation(**SMALL | {"record": RecordingSettings(num_samples=2)} | values)
        data = PromptData(source or FewPrompts())
        return evaluation.evaluate(nano, {}, settings, data, (tmp_path / "data", tmp_path / "run"))

    return run


def printed(report):
    console = Console(record=True, width=80)
    print_report(report, console)
    return console.export_text()


def test_lossy_rules_have_their_quality_measured_unasked(call, tmp_path):
    rules = {name: papers.BiasedVerification(0.05, name) for name in ("opt", "uno")}
    report = call(live="all", live_rules=("fixed_length",), compare_verification=rules)
    target, *others = (row.quality for row in report.live)
    assert [row.name for row in report.live][-2:] == ["uno K=1, lossy", "uno K=3, lossy"]
    assert all(row.perplexity.value > 1 and row.score is None for row in (target, *others))
    assert list(others[-1].win_rates) == ["target alone", "opt K=3, lossy"]
    assert all(0 <= rate.value <= 1 for row in others for rate in row.win_rates.values())
    text = printed(report)
    assert "Quality of responses" in text and "uno K=3, lossy over opt K=3, lossy: win rate" in text
    assert comparisons(report)[1] in html_of(report)
    paths = report_files.write_report(report, tmp_path / "written")
    written = json.loads(paths[1].read_text())
    Draft202012Validator(SCHEMA).validate(written)
    assert written["context"]["score"] is None
    assert "quality.perplexity.value" in paths[2].read_text().splitlines()[0]


def test_perplexities_are_those_of_the_journals_tokens(call, nano, tmp_path):
    report = call(live="all", live_rules=("fixed_length",), quality=True)
    _, *lines = (tmp_path / "run" / "generations.jsonl").read_text().splitlines()
    entries = [json.loads(line)["entry"] for line in lines]
    from specheads.evaluation.live_rows import response_nats

    prompts = [nano.encode_instruction(prompt.text) for prompt in FewPrompts().load(False) if prompt.split == "test"][:4]
    for number, row in enumerate(report.live):
        texts = [entry["responses"][number][0] for entry in entries]
        nats = sum(sum(response_nats(nano.target_lm, ids, [text])) for ids, text in zip(prompts, texts, strict=True))
        assert row.quality.perplexity.value == pytest.approx(np.exp(nats / sum(map(len, texts))), rel=1e-5)


def test_lossless_rules_have_it_measured_only_if_asked(call, tmp_path):
    report = call(live="all", live_rules=("fixed_length",))
    assert all(row.quality is None for row in report.live) and "Quality" not in printed(report)
    assert "score" not in report.context
    assert "responses" not in json.loads((tmp_path / "run" / "generations.jsonl").read_text().splitlines()[1])["entry"]


def test_a_resumed_evaluation_reads_the_same_responses(call, monkeypatch):
    values = {"verification": papers.BigLittle(), "live_rules": ("fixed_length",)}
    first = call(**values)
    from specheads.evaluation import decode, sweep

    monkeypatch.setattr(decode, "is_resumed", lambda folder: True)
    monkeypatch.setattr(sweep.Sweep, "_decoded", lambda *arguments: pytest.fail("everything is decoded"))
    assert [row.quality for row in call(**values).live] == [row.quality for row in first.live]


def questions(folder, score):
    rows = [{"question": f"def add_{number}(x):\n", "answer": f"adds\n#### {number}"} for number in range(9)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetSource(str(path), None, "train", None, "{question}", None, 1, 3, 5, "{answer}", score=score)


@pytest.mark.parametrize(("name", "title"), [("exact_number", "numbers"), ("rouge_l", "ROUGE-L")])
def test_responses_are_scored_by_those_of_the_data_set(call, tmp_path, monkeypatch, nano, name, title):
    monkeypatch.setattr(type(nano), "decode", lambda self, tokens: "adds 6")  # right for one of the questions 4 to 7
    report = call(questions(tmp_path, name), verification=papers.BigLittle(), live_rules=("fixed_length",))
    expected = 1 / 4 if name == "exact_number" else (1 + 3 * 1 / 2) / 4  # ROUGE-L: else one of two words is right
    assert report.context["score"] == name and title in printed(report)
    assert [row.quality.score.value for row in report.live] == [pytest.approx(expected, abs=1e-6)] * len(report.live)


def test_data_without_a_score_is_read_without_its_responses(call, tmp_path):
    report = call(questions(tmp_path, None), verification=papers.BigLittle(), live_rules=("fixed_length",))
    assert all(row.quality.score is None for row in report.live)
