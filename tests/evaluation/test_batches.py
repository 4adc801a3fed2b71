"""Batches that an evaluation decodes: settings chosen on dev prompts, runs that are kept,
tables.
"""

import json

import pytest
import torch
from fakes import FewPrompts
from jsonschema import Draft202012Validator
from rich.console import Console

from specheads import AcceptanceHead, HeadConfig, UserError, papers, verification
from specheads.decoding.records import DecodeStats
from specheads.evaluation import presentation
from specheads.evaluation.batches import BatchRun, batch_rows
from specheads.evaluation.candidates import TARGET_ALONE, Candidate
from specheads.evaluation.evaluate import evaluate
from specheads.evaluation.keys import RecordingSettings
from specheads.evaluation.presentation import print_report
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.settings import Evaluation
from specheads.storage.files import write_json
from specheads.storage.runs import STATE

SMALL = {
    "num_prompts": 4,
    "num_dev_prompts": 3,
    "max_new_tokens": 8,
    "fixed_lengths": (1, 3),
    "thresholds": (0.4,),
}
LIVE = {
    "num_live_prompts": 3,
    "timing_seconds": 0.5,
    "record": RecordingSettings(num_samples=2),
    "engine": "eager",
    "ratios": (10,),
}


@pytest.fixture
def call(small_pair, tmp_path):
    """A function that evaluates a head, or none, with some settings."""
    torch.manual_seed(0)
    config = HeadConfig(small_pair.draft_lm.hidden_size, 0)
    head = AcceptanceHead(config).eval().requires_grad_(False)
    torch.nn.init.normal_(head.readout.weight)

    def run(with_head=True, **values):
        settings = Evaluation(**SMALL | LIVE | values)
        heads = {"mine": head} if with_head else {}
        return evaluate(
            small_pair,
            heads,
            settings,
            PromptData(FewPrompts()),
            (tmp_path / "data", tmp_path / "run"),
        )

    return run


def test_batches_of_every_size_are_decoded_reported_and_kept(call, tmp_path, caplog):
    caplog.set_level("INFO")
    report = call(concurrency=(1, 2, 2), repeats=2)
    assert [(table.concurrency, table.num_requests) for table in report.batches] == [(1, 3), (2, 4)]
    for table in report.batches:
        assert [row.family.split()[0] for row in table.rows] == [
            "target",
            "fixed_length",
            "head_threshold",
        ]
        assert all(row.lossless for row in table.rows)
        assert (
            table.rows[0].over_alone,
            table.rows[0].speedup.value,
            table.rows[0].tokens_per_round,
        ) == (1, 1, 1)
        assert all(
            row.tokens_per_second > 0 and row.token_ms["p50"] <= row.token_ms["p99"]
            for row in table.rows
        )
    assert f"batches: {2 * 3 * (3 + 4)} responses of at most 8 tokens" in caplog.text

    paths = {path.name: path for path in presentation.write_report(report, tmp_path / "written")}
    content = json.loads(paths["report.json"].read_text())
    schema = json.loads(
        (presentation.Path(presentation.__file__).parent / "report.schema.json").read_text()
    )
    Draft202012Validator(schema).validate(content)
    assert len(content["batches"][1]["rows"]) == 3
    console = Console(record=True, width=80)
    print_report(report, console, verbose=True)
    text = console.export_text()
    assert "2 at once: 4 requests" in text
    start = text.index("1 at once")
    assert all(len(line) <= 80 and "…" not in line for line in text[start:].splitlines())

    # A run that was killed resumes with the same settings and numbers, and decodes only what is
    # missing.
    write_json(tmp_path / "run" / STATE, {"resumed": True})
    journal = tmp_path / "run" / "batches-2.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 3
    journal.write_text("".join(lines[:4]) + lines[4][: len(lines[4]) // 2])
    again = call(concurrency=(1, 2, 2), repeats=2)
    assert again.batches[0] == report.batches[0]
    assert again.batches[1].rows[0].tokens_per_round == 1
    assert (
        journal.read_text().splitlines(keepends=True)[:4] == lines[:4]
        and len(journal.read_text().splitlines()) == 7
    )


def test_batches_without_a_head(call):
    (table,) = call(with_head=False, concurrency=(2,)).batches
    assert [row.name for row in table.rows] == ["target alone", table.rows[1].name]
    assert all(row.lossless and row.tokens_per_second > 0 for row in table.rows)


def run(seconds, *responses):
    """A run of responses, each the seconds of its prompt and the tokens and seconds of its
    rounds.
    """
    stats = [
        DecodeStats(
            sum(n for n, _ in rounds),
            0,
            0,
            0,
            len(rounds),
            0,
            prefill + sum(s for _, s in rounds),
            prefill,
        )
        for prefill, rounds in responses
    ]
    return BatchRun(seconds, stats, [rounds for _, rounds in responses])


SLOW = run(8.0, (0.1, [(1, 0.4), (1, 0.5)]), (0.2, [(1, 0.6), (1, 0.2)]))
FAST = run(1.0, (0.1, [(2, 0.4)]), (0.1, [(1, 0.2), (1, 0.2)]))
MIDDLE = run(2.0, (0.1, [(2, 0.9)]), (0.2, [(2, 0.3)]))


def test_the_numbers_of_rows_are_those_computed_by_hand():
    settings = [
        TARGET_ALONE,
        Candidate(
            "a family", "fast", None, None, rule_name="head_threshold", head="mine", automatic=True
        ),
    ]
    alone, fast = batch_rows(settings, [[SLOW, SLOW], [FAST, MIDDLE]], ["a", "b"])
    assert (alone.tokens_per_second, alone.over_alone, alone.tokens_per_round) == (0.5, 1.0, 1.0)
    assert fast.tokens_per_second == (4 + 2) / 2  # the median of two runs
    assert fast.over_alone == (8 + 4) / 2
    assert (fast.name, fast.family, fast.lossless, fast.rule_name, fast.head) == (
        "fast",
        "a family",
        True,
        "head_threshold",
        "mine",
    )
    assert fast.automatic and not alone.automatic
    # Requests: 2 tokens in 1.0, 1.0, 0.5, 0.5, 1.0 and 0.5 seconds.
    assert alone.request_tokens_per_second == pytest.approx(2.0)
    assert fast.request_tokens_per_second == pytest.approx((2 / 0.5 + 2 / 0.5) / 2)
    assert fast.speedup.value == pytest.approx((8 / 2.5) / (8 / 4.0))
    assert fast.speedup.low <= fast.speedup.value <= fast.speedup.high
    # Tokens of the fast setting: 0.2, 0.2, 0.2, 0.2, then 0.45, 0.45, 0.15, 0.15 seconds.
    assert fast.token_ms["p50"] == pytest.approx(200)
    # Places 6 and 7 of the sorted ones, counted from 0
    assert fast.token_ms["p90"] == pytest.approx(450)
    assert fast.first_token_ms["p50"] == pytest.approx(500)  # of 300, 500, 500, 1000
    assert alone.first_token_ms["p99"] == pytest.approx(800)
    assert fast.tokens_per_round == pytest.approx(8 / 5)


def test_repeated_prompts_are_resampled_together():
    """Where both requests are of one prompt there is nothing to resample."""
    settings = [TARGET_ALONE, Candidate("fixed_length", "fast", None, None)]
    _, one = batch_rows(settings, [[SLOW], [FAST]], ["a"])
    assert one.speedup.low == one.speedup.value == one.speedup.high


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"concurrency": (0,)}, r"concurrency.*0.* must be a positive integer"),
        ({"concurrency": (4, 2.5)}, r"concurrency.*2\.5.* must be a positive integer"),
        ({"concurrency": 4}, r"concurrency=4 must be a list"),
        ({"concurrency": ("many",)}, r"concurrency.*many.* must be a positive integer"),
        (
            {"concurrency": (4,), "drafting": papers.Tree(2), "verification": papers.TreeMatch()},
            r"concurrency=\[4\] decodes the best rules of a recording",
        ),
        (
            {"concurrency": (1, 4), "verification": verification.BlockVerification()},
            r"concurrency=\[1, 4\] decodes .* verification=token .* or concurrency=\[\]",
        ),
        (
            {"concurrency": (4,), "live": "none"},
            r"concurrency=\[4\] decodes .* live=winners",
        ),
    ],
    ids=["zero", "no integer", "no list", "a word", "trees", "another rule", "nothing live"],
)
def test_mistakes_get_one_message(values, message):
    with pytest.raises(UserError, match=message):
        Evaluation(**values)
