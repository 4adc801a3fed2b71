"""`specheads papers theory`: every section, its files, drafts of a data set, and mistakes."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from families import family_pair

from specheads import Warp
from specheads.errors import UserError
from specheads.papers.theory import report, stopping
from specheads.prompts.prompt import Prompt, ResponseLimits
from specheads.replay.head_scores import add_predictions
from specheads.replay.recording import Recorder, load_recording
from specheads.replay.response_tree import RecordSettings

PAPERS = Path(__file__).parents[3] / "benchmarks" / "papers.yaml"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(report, "NUM_TEXTS", 2000)
    monkeypatch.setattr(report, "NUM_DRAFTS", 2000)


def test_claims_hold_and_are_those_of_the_papers(tmp_path, capsys):
    text = report.theory(out=str(tmp_path / "theory"))
    written = json.loads((tmp_path / "theory" / "theory.json").read_text())
    claims = [claim for section in written["sections"] for claim in section["claims"]]
    assert not [claim for claim in claims if claim["outcome"] == "did not hold"]
    assert sum(claim["outcome"] == "held" for claim in claims) >= len(claims) - 2
    papers = yaml.safe_load(PAPERS.read_text())
    known = {item["id"] for paper in papers for item in paper["items"]}
    assert {name for claim in claims for name in claim["claims"]} <= known
    assert "held" in text and "theory.json" in text
    printed = capsys.readouterr().out
    assert all(section["source"].split(",")[0] in printed for section in written["sections"])
    assert max(map(len, printed.splitlines())) <= 80


def test_drafts_of_a_recording_are_accepted_as_they_were(tmp_path):
    """In greedy mode acceptance probabilities are 0 and 1, so their products add up to the accepted tokens."""
    pair, prompts = family_pair("llama"), [(Prompt(f"{i:04x}", "test", ""), [3 + i, 5, 7]) for i in range(4)]
    folder = Recorder(pair, Warp(0), ResponseLimits(26), RecordSettings(1, 4, 8), 0, tmp_path).record(prompts)
    add_predictions(folder, pair, {}, ground_truth=True)
    recording, drafts = load_recording(folder), report._recorded_drafts(folder)
    expected = []
    for first, length in zip(recording.first.tolist(), recording.lengths.tolist(), strict=True):
        accepted = recording.accepted[0, first : first + length]
        parts = [accepted[start : start + 4] for start in range(0, length - 3, 4)]
        expected += [int(part.long().cumprod(0).sum()) for part in parts]
    counts = drafts.cumprod(dim=1).sum(dim=1)
    assert counts.tolist() == expected and 0 in expected and max(expected) > 1
    assert torch.isin(drafts, torch.tensor([0.0, 1.0])).all()
    section = stopping.thresholds(torch.Generator().manual_seed(0), 200, {"llama": drafts})
    assert any(row[0] == "llama" for row in section.rows)


def test_mistakes_are_one_message(tmp_path):
    with pytest.raises(UserError, match="seed=many must be an integer"):
        report.theory(seed="many")
    with pytest.raises(UserError, match="holds no recording"):
        report.theory(out=str(tmp_path), data=str(tmp_path))
