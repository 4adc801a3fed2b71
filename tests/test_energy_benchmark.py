"""benchmarks/energy.py with a meter and without."""

import re

import pytest
import torch
from energy_fakes import CountingMeter

from benchmarks import energy
from specheads.evaluation.energy.meter import Idle
from specheads.evaluation.energy.metering import Metering

TINY = ["--sizes", "2", "1", "--lengths", "2", "--new-tokens", "4", "--requests", "4", "--repeats", "2", "--engine", "eager"]
ARGUMENTS = ["--models", "synthetic-tiny", "--drafting", "synthetic-tiny", *TINY, "--device", "cpu", "--result", "none"]


def lines_of(capsys, metering, monkeypatch):
    monkeypatch.setattr(energy, "metering_of", lambda pair: metering)
    with torch.no_grad():
        energy.main(ARGUMENTS)
    return capsys.readouterr().out.splitlines()


def test_where_nothing_counts_there_are_seconds_and_the_reason(capsys, monkeypatch):
    lines = lines_of(capsys, Metering(None, "no counter."), monkeypatch)
    assert lines[-1] == "Energy is not measurable here: no counter."
    assert [line for line in lines if line.startswith("| model")] == ["| model | million weights | rows | time per token |"]
    assert not any("J/token" in line for line in lines)
    assert len([line for line in lines if re.match(r"\| synthetic", line)]) == 2 + 2 * 2


def test_with_a_meter_there_are_joules_per_token_of_every_model_and_batch(capsys, monkeypatch):
    """Every run takes 8 J and 0.5 s, the idle machine 4 W, for 16 tokens: 0.5 J a token, of which 0.125 are those of idling."""
    meter = CountingMeter(8.0, 0.5, Idle(4.0, 3.0, 0.1))
    lines = lines_of(capsys, Metering(meter), monkeypatch)
    rows = [line.split(" | ") for line in lines if line.startswith("| synthetic")]
    assert [row[2] for row in rows[:2]] == ["1", "2"]  # the smallest batch first
    assert all(row[-4:-1] == ["0.5000", "0.3750", "1.00x"] for row in rows) and len(rows) == 6
    assert "idle machine takes 4 W, measured for 3 s; the counter moves every 100 ms" in lines[-1]
    assert pytest.approx(1.96 * 0.1 * (2 / 6) ** 0.5 / 1.0, abs=0.001) == float(rows[0][-1].rstrip(" %|")) / 100
