"""The quality of responses in evaluations of a small pair."""

import json
from pathlib import Path

import numpy as np
import pytest
from fakes import FewPrompts
from jsonschema import Draft202012Validator
from rich.console import Console

from specheads import papers
from specheads.evaluation import evaluate as evaluation
from specheads.evaluation import report_files
from specheads.evaluation.page.document import html_of
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.report_files import print_report
from specheads.evaluation.settings import Evaluation, RecordingSettings
from specheads.prompts.data_set_source import DatasetSource

SMALL = {"num_prompts": 4, "num_dev_prompts": 3, "num_live_prompts": 4, "max_new_tokens": 8, "fixed_lengths": (1, 3)}
SCHEMA = json.loads((Path(report_files.__file__).parent / "report.schema.json").read_text())


@pytest.fixture
def call(small_pair, tmp_path):
    """A function that evaluates a pair without a head."""

    def run(source=None, **values):
        settings = Evaluation(**SMALL | {"record": RecordingSettings(num_samples=2)} | values)
        data = PromptData(source or FewPrompts())
        return evaluation.evaluate(small_pair, {}, settings, data, (tmp_path / "data", tmp_path / "run"))

    return run


def printed(report):
    console = Console(record=True, width=80)
    print_report(report, console)
    return console.export_text()


def test_lossy_rules_have_their_quality_measured_unasked(call, tmp_path):
    report = call(live_rules=("fixed_length",), verification=papers.BiasedVerification(0.05))
    target, *others = (row.quality for row in report.live)
    assert [row.name for row in report.live] == ["target alone", "fixed K=1", "fixed K=3"]
    assert all(row.perplexity.value > 1 and row.score is None for row in (target, *others))
    assert target.rejections_per_token is None and others[0].rejections_per_token.value > 0
    assert "Quality of responses" in printed(report) and "Quality of responses" in html_of(report)
    paths = report_files.write_report(report, tmp_path / "written")
    written = json.loads(paths[1].read_text())
    Draft202012Validator(SCHEMA).validate(written)
    assert written["context"]["score"] is None
    assert written["live"][0]["quality"]["perplexity"]["value"] == pytest.approx(target.perplexity.value)


def test_perplexities_are_those_of_the_journals_tokens(call, small_pair, tmp_path):
    report = call(live_rules=("fixed_length",), verification=papers.BiasedVerification(0.05))
    _, *lines = (tmp_path / "run" / "generations.jsonl").read_text().splitlines()
    entries = [json.loads(line)["entry"] for line in lines]
    from specheads.evaluation.live_rows import response_nats

    prompts = [small_pair.encode_instruction(prompt.text) for prompt in FewPrompts().load(False) if prompt.split == "test"][:4]
    for number, row in enumerate(report.live):
        texts = [entry["responses"][number][0] for entry in entries]
        nats = sum(sum(response_nats(small_pair.target_lm, ids, [text])) for ids, text in zip(prompts, texts, strict=True))
        assert row.quality.perplexity.value == pytest.approx(np.exp(nats / sum(map(len, texts))), rel=1e-5)


def test_lossless_rules_do_not_have_it_measured(call, tmp_path):
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
def test_responses_are_scored_by_those_of_the_data_set(call, tmp_path, monkeypatch, small_pair, name, title):
    monkeypatch.setattr(type(small_pair), "decode", lambda self, tokens: "adds 6")  # right for one of the questions 4 to 7
    report = call(questions(tmp_path, name), verification=papers.BigLittle(), live_rules=("fixed_length",))
    expected = 1 / 4 if name == "exact_number" else (1 + 3 * 1 / 2) / 4  # ROUGE-L: else one of two words is right
    assert report.context["score"] == name and title in printed(report)
    assert [row.quality.score.value for row in report.live] == [pytest.approx(expected, abs=1e-6)] * len(report.live)


def test_data_without_a_score_is_read_without_its_responses(call, tmp_path):
    report = call(questions(tmp_path, None), verification=papers.BigLittle(), live_rules=("fixed_length",))
    assert all(row.quality.score is None for row in report.live)
