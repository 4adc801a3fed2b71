import csv
import json

import pytest
from fakes import constant_head, tiny_pair
from rich.console import Console

from specheads import Warp, stopping, verification
from specheads.evaluation.report import make_report, print_report, write_report
from specheads.evaluation.sweep import run_sweep, sweep_settings


@pytest.fixture(scope="module")
def measured():
    settings = sweep_settings([1, 3], constant_head(0.8), [0.3, 0.6])
    return run_sweep(tiny_pair(5), settings, [[0], [1, 2], [3], [4, 4]], Warp(), max_new_tokens=12, repeats=2, seed=0)


@pytest.fixture(scope="module")
def report(measured):
    return make_report(measured, {"model": "tiny", "num_prompts": 4}, [5, 10, 20])


def test_every_setting_decoded_every_prompt_as_often_as_asked(measured):
    assert [m.setting.name for m in measured] == ["target alone", "fixed K=1", "fixed K=3", "head 0.3", "head 0.6"]
    for m in measured:
        assert [part.num_tokens for part in m.stats] == [24] * 4  # two repeats of twelve tokens
        assert len(m.token_seconds) == 96
    assert all(part.num_draft_calls == 0 and part.num_target_calls == 24 for part in measured[0].stats)


def test_the_counts_do_not_depend_on_which_settings_run_beside_them(measured):
    alone = run_sweep(tiny_pair(5), [measured[2].setting], [[0], [1, 2], [3], [4, 4]], Warp(), 12, repeats=2, seed=0)[0]
    names = ("num_tokens", "num_drafted", "num_accepted", "num_target_calls")
    for one, other in zip(alone.stats, measured[2].stats, strict=True):
        assert [getattr(one, n) for n in names] == [getattr(other, n) for n in names]


def test_a_row_says_what_its_setting_did(measured, report):
    row, stats = report.rows[2], measured[2].stats
    assert row.discard_rate.value == pytest.approx(sum(s.num_discarded for s in stats) / 96)
    assert row.verification_rate.value == pytest.approx(sum(s.num_target_calls for s in stats) / 96)
    assert row.discard_rate.low <= row.discard_rate.value <= row.discard_rate.high
    assert row.milliseconds["p50"] <= row.milliseconds["p90"] <= row.milliseconds["p99"]
    assert report.rows[0].speedup.value == pytest.approx(1)
    assert set(row.predicted_speedup) == {"measured", "5", "10", "20"}


def test_the_files_hold_the_report(report, tmp_path):
    paths = write_report(report, tmp_path / "new")
    assert [p.name for p in paths] == ["report.json", "report.csv", "pareto.png", "speed.png"]
    content = json.loads(paths[0].read_text())
    assert content["costs"]["draft_seconds"] == report.costs.draft_seconds
    assert [row["name"] for row in content["rows"]] == [row.name for row in report.rows]
    with paths[1].open() as stream:
        rows = list(csv.DictReader(stream))
    assert float(rows[3]["predicted_speedup.10.value"]) == report.rows[3].predicted_speedup["10"].value
    for path in paths[2:]:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_every_setting_and_the_fit(report):
    console = Console(record=True, width=200)
    print_report(report, console)
    text = console.export_text()
    for word in ("target alone", "fixed K=3", "head 0.6", "R²", "head over best fixed K at ratio 10"):
        assert word in text


def test_other_verification_rules_are_compared_at_equal_lengths():
    others = {"block": verification.BlockVerification(), "biased": verification.BiasedVerification(0.5)}
    settings = sweep_settings([2, 4], None, [], stopping.MaxProbability(0.5, 3), others)
    names = ["target alone", "fixed K=2", "fixed K=4", "max probability", "block K=2", "block K=4", "biased K=2, lossy"]
    assert [one.name for one in settings][:-1] == names
    prompts = [[0], [1, 2], [3], [4, 4], [2, 2], [1, 1]]
    measured = run_sweep(tiny_pair(5), settings, prompts, Warp(), max_new_tokens=40, repeats=2, seed=0)
    context = {"model": "tiny", "num_prompts": 6, "verification": "token verification", "lossless": True}
    report = make_report(measured, context, [10])
    rows = {row.name: row for row in report.rows}
    assert [row.lossless for row in report.rows] == [True] * 6 + [False] * 2
    gain = rows["block K=4"].efficiency_gain
    assert gain.value == pytest.approx(rows["block K=4"].block_efficiency / rows["fixed K=4"].block_efficiency)
    assert gain.low <= gain.value <= gain.high
    assert rows["biased K=4, lossy"].efficiency_gain.value > 1.05
    assert rows["fixed K=4"].efficiency_gain is None and rows["max probability"].efficiency_gain is None
    console = Console(record=True, width=200)
    print_report(report, console)
    assert "block K=4: block efficiency" in console.export_text()
