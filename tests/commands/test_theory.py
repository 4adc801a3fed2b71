"""`specheads papers theory`: every section, its files, and mistakes."""

import json
from pathlib import Path

import pytest
import yaml

from specheads.commands import papers
from specheads.errors import UserError

CLAIMS = Path(__file__).parents[2] / "benchmarks" / "papers.yaml"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(papers, "NUM_TEXTS", 2000)
    monkeypatch.setattr(papers, "NUM_DRAFTS", 2000)
    monkeypatch.setattr(papers, "NUM_PROGRAMMES", 1)


def test_claims_hold_and_are_those_of_the_papers(tmp_path, capsys):
    text = papers.theory(out=str(tmp_path / "theory"))
    written = json.loads((tmp_path / "theory" / "theory.json").read_text())
    claims = [claim for section in written["sections"] for claim in section["claims"]]
    assert not [claim for claim in claims if claim["outcome"] == "did not hold"]
    assert sum(claim["outcome"] == "held" for claim in claims) >= len(claims) - 2
    listed = yaml.safe_load(CLAIMS.read_text())
    known = {item["id"] for paper in listed for item in paper["items"]}
    assert {name for claim in claims for name in claim["claims"]} <= known
    assert "held" in text and "theory.json" in text
    printed = capsys.readouterr().out
    assert all(section["source"].split(",")[0] in printed for section in written["sections"])
    assert max(map(len, printed.splitlines())) <= 80


def test_mistakes_are_one_message():
    with pytest.raises(UserError, match="seed=many must be an integer"):
        papers.theory(seed="many")
