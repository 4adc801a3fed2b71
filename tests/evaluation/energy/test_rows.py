import csv
import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from energy_fakes import CountingMeter
from fakes import tiny_pair
from jsonschema import Draft202012Validator
from rich.console import Console

from specheads import Warp
from specheads.decoding.stopping import FixedLength
from specheads.evaluation import report_files
from specheads.evaluation.batch_sweep import ALONE, BatchSetting, BatchSweep
from specheads.evaluation.batches import batch_rows
from specheads.evaluation.console import print_report
from specheads.evaluation.doubts import with_measured
from specheads.evaluation.energy.meter import Idle, resolution_error
from specheads.evaluation.energy.text import energy_text
from specheads.evaluation.live_rows import live_rows
from specheads.evaluation.page.document import html_of
from specheads.evaluation.report import BatchTable, Report
from specheads.evaluation.report_files import write_report
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.sweep import TARGET_ALONE, Setting, Sweep
from specheads.storage.journal import Journal

PROMPTS = [[0], [1, 2], [3], [4, 4]]
SETTINGS = [TARGET_ALONE, *(Setting(f"fixed K={k}", "fixed_length", k, FixedLength(k)) for k in (1, 3))]
IDLE = Idle(watts=10.0, seconds=3.0, update_seconds=0.1)
SCHEMA = json.loads((Path(report_files.__file__).parent / "report.schema.json").read_text())


def sweep_of(meter, journal=None):
    return Sweep(tiny_pair(5), Warp(), max_new_tokens=12, repeats=2, meter=meter).run(SETTINGS, PROMPTS, journal)


@pytest.fixture(scope="module")
def measured():
    """Responses of 12 tokens take 3 J and 0.2 s by the meter."""
    return sweep_of(CountingMeter(joules=3.0, seconds=0.2))


def report_of(measured, idle, energy):
    table = with_measured(CostTable({}), measured, {})
    context = {"model": "tiny", "num_live_prompts": 4, "verification": "token verification", "energy": energy}
    return Report(context, table.fit, [], live_rows(measured, table, True, idle=idle))


@pytest.fixture(scope="module")
def report(measured):
    return report_of(measured, IDLE, {"counters": ["RAPL package-0", "RAPL dram"], "idle": asdict(IDLE)})


def test_each_response_has_the_energy_between_two_readings(measured):
    for decoded in measured:
        assert [[tuple(energy) for energy in responses] for responses in decoded.energy] == [[(3.0, pytest.approx(0.2))] * 2] * 4


def test_the_energy_of_rows_is_by_token_with_and_without_that_of_an_idle_machine(report):
    for row in report.live:
        assert row.energy.joules_per_token.value == pytest.approx(3 / 12)
        assert row.energy.above_idle.value == pytest.approx((3 - 10 * 0.2) / 12)
        assert row.energy.over_alone.value == pytest.approx(1)
        assert row.energy.resolution_error == pytest.approx(resolution_error(0.1, 8, 8 * 0.2))


def test_energy_over_the_target_alone_is_a_ratio_of_joules_per_token():
    measured = sweep_of(CountingMeter(joules=3.0, seconds=0.2))
    measured[2].energy = [[energy._replace(joules=12.0) for energy in responses] for responses in measured[2].energy]
    rows = report_of(measured, IDLE, {}).live
    assert rows[2].energy.over_alone.value == pytest.approx(4) and rows[1].energy.over_alone.value == pytest.approx(1)
    assert rows[2].energy.joules_per_token.value == pytest.approx(1)


def test_a_resumed_sweep_keeps_the_energy_that_it_measured(tmp_path, measured):
    path = tmp_path / "generations.jsonl"
    sweep_of(CountingMeter(joules=3.0, seconds=0.2), journal=Journal(path, {}))
    resumed = sweep_of(CountingMeter(joules=7.0, seconds=1.0), journal=Journal(path, {}))
    assert [decoded.energy for decoded in resumed] == [decoded.energy for decoded in measured]


def test_console_page_and_files_show_energy(report, tmp_path):
    text = printed(report)
    assert re.search(r"fixed K=1 +0.25 ±\S+ +0.0833 ±\S+ +1.000x", text)
    assert (
        "by RAPL package-0, RAPL dram" in text and "10 W of the idle machine, measured for 3 s" in text and "every 100 ms" in text
    )
    page = html_of(report)
    assert page.count('<button type="button">J/token</button>') == 1 and "0.25" in page and energy_text(report) in page
    _, content, table = write_report(report, tmp_path)[:3]
    content = json.loads(content.read_text())
    Draft202012Validator(SCHEMA).validate(content)
    assert content["live"][0]["energy"]["joules_per_token"]["value"] == pytest.approx(0.25)
    assert [float(row["energy.over_alone.value"]) for row in rows_of(table)] == pytest.approx([1] * 3)


def test_batches_have_the_energy_of_whole_runs(report, tmp_path):
    settings = [ALONE, BatchSetting("fixed K=2", "fixed_length", FixedLength(2))]
    sweep = BatchSweep(tiny_pair(5), Warp(), 12, 2, repeats=3, engine="eager", window=32, meter=CountingMeter(6.0, 0.3))
    journal = tmp_path / "batches.jsonl"
    runs = sweep.run(settings, PROMPTS, Journal(journal, {}))
    assert [run.energy for run in runs[1]] == [(6.0, pytest.approx(0.3))] * 3
    resumed = sweep.run(settings, PROMPTS, Journal(journal, {}))
    assert [run.energy for run in resumed[1]] == [run.energy for run in runs[1]]
    tables = [BatchTable(2, 4, batch_rows(settings, runs, range(4), IDLE))]
    assert tables[0].rows[1].energy.joules_per_token == pytest.approx(6 / 48)
    report = replace(report, batches=tables)
    assert re.search(r"J/token", printed(replace(report, live=[]))) and html_of(report).count("J over target") == 2
    _, content, table = write_report(report, tmp_path)[:3]
    Draft202012Validator(SCHEMA).validate(json.loads(content.read_text()))
    assert float(rows_of(table)[-1]["energy.above_idle"]) == pytest.approx((6 - 10 * 0.3) / 48)


def test_where_nothing_counts_there_is_a_line_instead_of_columns(tmp_path):
    measured = sweep_of(None)
    assert not any(decoded.energy for decoded in measured)
    report = report_of(measured, None, {"not_measurable": "no counter."})
    assert "Energy is not measurable here: no counter." in printed(report) and "J/token" not in printed(report)
    page = html_of(report)
    assert "Energy is not measurable here: no counter." in page and "J/token" not in page
    content, table = write_report(report, tmp_path)[1:3]
    Draft202012Validator(SCHEMA).validate(json.loads(content.read_text()))
    assert not any("energy" in name for name in rows_of(table)[0])


def test_a_report_of_nothing_decoded_says_nothing_of_energy():
    assert energy_text(Report({}, None)) is None


def printed(report):
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=250))
    return stream.getvalue()


def rows_of(table):
    with table.open() as stream:
        return list(csv.DictReader(stream))
