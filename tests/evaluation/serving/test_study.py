"""Choice on dev prompts, tables, files."""

import json

import pytest
from random_recording import random_recording
from rich.console import Console

from specheads import UserError
from specheads.decoding.load.costs import LoadCosts, SecondsTable
from specheads.decoding.load.lengths import FixedK
from specheads.evaluation.serving import study
from specheads.evaluation.serving.candidates import BY_BATCH, FIXED, LENGTHS, USUAL, families
from specheads.evaluation.serving.readouts import head_read_out
from specheads.evaluation.serving.report import conclusions, print_tables, write_tables
from specheads.evaluation.serving.settings import LoadSettings
from specheads.evaluation.serving.study import Load, Study, best_value
from specheads.replay.replay import RecordedHead

COSTS = LoadCosts(SecondsTable((1, 40, 80), (0.0005, 0.0005, 0.0007)), SecondsTable((1, 24, 25), (0.004, 0.004, 0.0042)), {})
DEV, TEST = (random_recording(num_prompts=20, max_tokens=10, acceptance=0.7, seed=seed, longest=24) for seed in (1, 2))
LOADS = [Load(1, turnover=1), Load(32, turnover=1), Load(8, rate=40.0, burst=2, turnover=1)]


@pytest.fixture(scope="module")
def tables():
    head = RecordedHead("draft_prob", "next_token")
    policies = families(DEV, COSTS, {"other": head_read_out(DEV, head)}, 4)
    assert {family.name for family in policies if not family.lossless} == {"TETRIS, lossy"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "LEAST_REQUESTS", 8)  # short simulations
        return Study(DEV, TEST, COSTS, 2).run(policies, LOADS)


def test_every_load_has_a_row_for_every_policy(tables):
    assert [table.load for table in tables] == ["1 at once", "32 at once", "40 per second in bursts of 2"]
    names = [[row.family for row in table.rows] for table in tables]
    assert names[0] == names[1] == names[2] and len(names[0]) == len(set(names[0]))
    assert {FIXED, USUAL, BY_BATCH, "load-aware", "load-aware, other"} <= set(names[0])
    assert tables[0].alone > 0 and tables[2].alone is None


def test_lengths_are_chosen_on_dev_prompts_for_each_load(tables, monkeypatch):
    """The best on dev prompts by simulating each, with the same requests."""
    monkeypatch.setattr(study, "LEAST_REQUESTS", 8)
    load = LOADS[1]
    fixed = next(family for family in families(DEV, COSTS, {}, 6) if family.name == FIXED)
    assert fixed.values == [(length,) for length in LENGTHS] and fixed.make((3,), 1).max_tokens == FixedK(3).max_tokens
    assert tables[1].row(FIXED).value == best_value(fixed, load, DEV, COSTS)
    assert tables[0].row(FIXED).value > tables[1].row(FIXED).value  # more load, shorter drafts
    assert tables[0].row(FIXED).over_fixed.value == 1.0
    assert tables[0].row(USUAL).value == ()


def test_tables_are_printed_and_written(tables, tmp_path):
    console = Console(record=True, width=200)
    print_tables(tables, "a title", console)
    text = console.export_text()
    assert "a title: 32 at once" in text and "TETRIS, lossy" in text and "load-aware: faster than the target alone" in text
    narrow = Console(record=True, width=80)
    print_tables(tables, "a title", narrow)
    assert "…" not in (lines := narrow.export_text()) and max(map(len, lines.splitlines())) <= 80
    written = write_tables(tables, {"title": "a title"}, tmp_path)
    assert [path.name for path in written] == ["load.json", "load.csv", "load.png", "load.html"]
    page = written[3].read_text()
    assert 'data-figure="front"' in page and page.count('<div class="panel" data-load=') == len(tables) + 1
    assert "32 at once; the target alone makes" in page and ">lossy</abbr>" in page
    content = json.loads(written[0].read_text())
    assert content["tables"][1]["rows"][0]["numbers"]["tokens_per_second"]["value"] > 0
    assert len(written[1].read_text().splitlines()) == 1 + sum(len(table.rows) for table in tables)
    assert written[2].stat().st_size > 10_000


def test_conclusions_say_where_speculation_stops_paying(tables):
    (usual,) = (text for text in conclusions(tables) if text.startswith(f"{USUAL}:"))
    assert usual == "K = 7: faster than the target alone with 1 requests at once, not with 32."


def test_bad_settings_are_refused(tmp_path):
    with pytest.raises(UserError, match="leave nothing to simulate"):
        LoadSettings(concurrencies=(), rates=())
    with pytest.raises(UserError, match="accelerator=x is not known"):
        LoadSettings(accelerator="x")
    with pytest.raises(UserError, match="cannot be read as costs"):
        LoadSettings(costs=str(tmp_path / "none.json")).load_costs()
    assert LoadSettings().load_costs().provenance["device"] == "h200"
