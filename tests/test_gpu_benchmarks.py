"""The scripts for a GPU run on a CPU with tiny models, without training libraries, and are resumed after a kill."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import budget, script
from benchmarks.gpu.budget import Sizes, step_seconds, tables
from benchmarks.gpu.goals import GOALS
from benchmarks.gpu.machine import DATA_SHEETS, limits_of
from benchmarks.gpu.script import Setup, TimeIsUp, measured_document, run_script
from benchmarks.gpu.timeline import Span, covered, timeline
from benchmarks.gpu.training import Distilling
from benchmarks.render import ROOT
from benchmarks.steps import bytes_read
from specheads import SpeculativeDecoder, load_pair
from tests.integrations.test_light_imports import WITHOUT

PARTS = {
    "probe": ["memory", "launches", "attention", "flexible_attention"],
    "build_pairs": ["llama3"],
    "round": ["sampled_steps", "rounds", "timeline", "greedy_steps"],
    "training": ["distillation", "heads_of_llama2"],
    "data": ["labels", "responses"],
}
EVERY_SCRIPT = """
import runpy
for name in sys.argv[2:]:
    sys.argv = [name, "--device", "cpu", "--tiny", "--keep", f"{FOLDER}/{name}.json"]
    try:
        runpy.run_module(f"benchmarks.gpu.{name}", run_name="__main__")
    except SystemExit as done:
        assert done.code == 0, (name, done.code)
"""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which every script has kept its JSON, run by a process that has torch and transformers only."""
    folder = tmp_path_factory.mktemp("gpu")
    code = WITHOUT + f"FOLDER = {str(folder)!r}\n" + EVERY_SCRIPT
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, "", *PARTS], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def kept(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("name", PARTS)
def test_every_part_of_every_script_measures_something(folder, name):
    document = kept(folder, name)
    assert document["complete"] and document["script"] == name and document["tiny"]
    assert list(document["parts"]) == PARTS[name]
    assert all(len(part) > 1 and "failed" not in part for part in document["parts"].values())
    assert document["machine"]["torch"] == torch.__version__ and document["limits"]["bytes_per_second"] > 0


def test_every_goal_is_measured_by_its_script(folder):
    reached = {name: {goal for part in kept(folder, name)["parts"].values() for goal in part.get("goals", {})} for name in PARTS}
    assert reached == {name: {key for key, goal in GOALS.items() if goal.script == name} for name in PARTS}


def test_steps_are_told_from_the_rest_of_a_round(folder):
    parts = kept(folder, "round")["parts"]
    names = [row["step"] for row in parts["sampled_steps"]["rows"]]
    assert names == ["target alone", "verification of 8", "verification of 9", "draft step", "draft step with head"]
    for row in parts["rounds"]["rows"]:
        spent = row["draft_seconds"] + row["verify_seconds"]
        assert row["round_seconds"] * (1 - row["not_a_forward_pass"]) == pytest.approx(spent)
        assert row["tokens_per_round"] > 1
    assert {row["stage"] for row in parts["timeline"]["host"]} == {"draft step", "verification"}


# --- parts, limits and goals


def test_a_part_that_fails_loses_no_other(tmp_path, caplog):
    def first():
        return {"value": 1}

    def second():
        raise ValueError("too large\nby far")

    def third():
        return {"value": 3}

    document = measured_document("some", Setup(CPU, True), lambda setup: [first, second, third], tmp_path / "a" / "some.json")
    assert document == kept(tmp_path / "a", "some")
    assert not document["complete"] and document["parts"]["second"]["failed"] == "ValueError: too large"
    assert [document["parts"][name]["value"] for name in ("first", "third")] == [1, 3]
    assert "second failed" in caplog.text


def test_a_script_whose_time_is_up_prints_what_it_has(tmp_path, capsys, monkeypatch):
    def first():
        return {"value": 1}

    def second():
        try:
            signalled()
        except Exception as error:
            raise AssertionError("no handler of ordinary errors may catch it") from error

    def signalled():
        script._stop()

    arguments = ["--device", "cpu", "--tiny", "--keep", str(tmp_path / "some.json")]
    assert run_script("some", "Doc.", lambda setup: [first, second], arguments) == 1
    document = json.loads(capsys.readouterr().out)
    assert document == kept(tmp_path, "some") and list(document["parts"]) == ["first"] and "stopped" in document
    assert not issubclass(TimeIsUp, Exception)


def test_an_unknown_device_is_refused(capsys):
    assert run_script("some", "Doc.", lambda setup: [], ["--device", "warp"]) == 2
    assert "device='warp' cannot be used here" in capsys.readouterr().err


def test_limits_are_those_of_the_data_sheet(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert limits_of(torch.device("cuda")).bytes_per_second == DATA_SHEETS["H100 PCIe"][0]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert limits_of(torch.device("cuda")).bytes_per_second == DATA_SHEETS["H100"][0]


def test_goals_are_met_on_the_right_side():
    assert GOALS["target_alone"].is_met(0.71) and not GOALS["target_alone"].is_met(0.69)
    assert GOALS["round"].is_met(1.1) and not GOALS["round"].is_met(1.2)


# --- the timeline


def test_a_timeline_tells_stages_from_gaps():
    spans = [
        Span("draft step", 100, 110, False),
        Span("verification", 120, 140, False),
        Span("aten::mm", 101, 105, False),
        Span("draft step", 104, 112, True),
        Span("gemm", 104, 110, True),
        Span("gemm", 108, 112, True),
        Span("softmax", 125, 130, True),
        Span("gemm", 90, 95, True),  # before the first stage
    ]
    made = timeline(spans)
    assert made["microseconds"] == 40 and made["not_in_a_stage"] == pytest.approx(0.25)
    assert made["host"] == [
        {"stage": "draft step", "start": 0, "end": 10},
        {"stage": "verification", "start": 20, "end": 40},
    ]
    assert made["device"] == [{"stage": "draft step", "start": 4, "end": 12}]
    assert made["device_busy"] == pytest.approx((8 + 5) / 40)
    assert made["kernels"][0] == {"kernel": "gemm", "calls": 2, "microseconds": 10}


def test_spans_within_others_are_counted_once():
    assert covered([Span("", 0, 10, True), Span("", 2, 3, True), Span("", 12, 13, True)]) == 11


# --- the budget


def test_bytes_of_a_step_are_those_that_a_decoder_reads():
    pair = load_pair("synthetic-tiny", device="cpu", dtype="bfloat16")
    decoder = SpeculativeDecoder(pair, engine="eager", window=512)
    decoder.generate([1, 2, 3], 2)
    assert Sizes.of("tiny").read_bytes == bytes_read(pair.target_lm, decoder.target_engine, budget.CONTEXT)


def test_rounds_are_made_of_steps():
    steps = step_seconds(10.0, 1.0, 1.05, 2.0)
    assert steps["target alone"] == 10 and steps["verification of 8"] == pytest.approx(10.5)
    assert steps["round, fixed K=4"] == pytest.approx(2 * (4 + 10.5))


def test_measurements_stand_next_to_the_budget(folder):
    documents = {name: kept(folder, name) for name in PARTS}
    for table in tables({}):
        assert all(row[-1] is None and row[-2] is not None for row in table.rows)
    goals, steps, speeds = tables(documents)
    for table in (goals, steps):
        assert all(row[-1] > 0 for row in table.rows), table.key
    assert [row[-1] is None for row in speeds.rows] == [False, True, False]  # tiny responses are not made in rows


def test_operations_of_distillation_are_counted_by_weights():
    """Two per weight and token in the target's forward pass, six in the draft's training."""
    made = Distilling(Setup(CPU, True))
    embedding = 256 * 64
    layers = sum(w.numel() for n, w in made.pair.target.named_parameters() if w.ndim == 2) - 2 * embedding
    num_tokens, num_responses = made.batch.tokens.numel(), len(made.batch.response_tokens)
    assert made._operations(reads_target=True) == 8 * (layers * num_tokens + embedding * num_responses)
    assert made._operations(reads_target=False) == 6 * (layers * num_tokens + embedding * num_responses)


# --- all scripts, one after the other


def test_only_what_is_left_is_run(folder, tmp_path, capsys, monkeypatch):
    place, left = tmp_path / runner.key_of(CPU, True), []
    place.mkdir()
    for name in PARTS:
        (place / f"{name}.json").write_text((folder / f"{name}.json").read_text())
    cut = kept(folder, "round") | {"complete": False, "stopped": "after 460 seconds"}
    (place / "round.json").write_text(json.dumps(cut))
    (place / "build_pairs.json").unlink()

    def run(name, folder, device, tiny):
        left.append(name)
        if name == "build_pairs":
            started(name, folder, device, tiny)

    started = runner.run
    monkeypatch.setattr(runner, "run", run)
    arguments = ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    assert runner.main(arguments) == 1
    out = capsys.readouterr().out
    assert left == ["build_pairs", "round"] and kept(place, "build_pairs")["complete"]
    assert "STOPPED: round after 460 seconds" in out and "verification of 8" in out
    assert sum(line.startswith(("met: ", "NOT MET: ")) for line in out.splitlines()) == len(GOALS)
    (place / "round.json").write_text((folder / "round.json").read_text())
    assert runner.main(arguments) == 0 and left == ["build_pairs", "round"]


def test_measurements_belong_to_the_code_and_the_machine(monkeypatch):
    keys = {runner.key_of(CPU, True), runner.key_of(CPU, False)}
    assert runner.key_of(CPU, True) in keys
    monkeypatch.setattr(runner, "description", lambda device: dict.fromkeys(runner.VERSIONS, "other"))
    assert runner.key_of(CPU, True) not in keys
    keys.add(runner.key_of(CPU, True))
    monkeypatch.setattr(runner, "CODE", ("data_gen",))
    assert runner.key_of(CPU, True) not in keys


def test_failed_parts_are_named():
    parts = {"steps": {"failed": "RuntimeError: out of memory"}, "rounds": {"goals": {"round": 1.3}}}
    lines = runner.summary({"round": {"parts": parts}})
    assert lines == [
        "NOT MET: a round, in its forward passes alone: 1.300, at most 1.15",
        "FAILED: round, steps: RuntimeError: out of memory",
    ]


def test_the_budget_takes_the_latest_gpu(folder, tmp_path):
    on_gpu = kept(folder, "round") | {"tiny": False}
    on_gpu["machine"] = on_gpu["machine"] | {"gpu": "NVIDIA A100-SXM4-80GB"}
    for name, document, time in (("old", on_gpu, 1), ("cpu", kept(folder, "round"), 3), ("b-tiny", on_gpu, 4)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "round.json").write_text(json.dumps(document))
        os.utime(tmp_path / name, (time, time))
    assert runner.latest_of_gpus(tmp_path) == {"round": on_gpu}
    assert runner.main(["--budget", "--device", "cpu", "--out", str(tmp_path)], tmp_path / "results") == 0
    result = json.loads((tmp_path / "results" / "gpu_budget.json").read_text())
    assert result["machine"]["gpu"] == "NVIDIA A100-SXM4-80GB" and "one A100" in result["tables"][1]["title"]
