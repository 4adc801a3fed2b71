"""`specheads probe`: a pair looked at, with its JSON."""

import json

import pytest

from specheads import UserError
from specheads.commands import evaluate
from specheads.commands.compose import command_config

SMALL = [
    "model=nano",
    "model.device=cpu",
    "model.dtype=float32",
    "num_prompts=6",
    "max_new_tokens=8",
    "engine=eager",
    "timing_seconds=1",
]


def composed(tmp_path, *words):
    where = [f"paths.data={tmp_path / 'data'}", f"paths.run={tmp_path}"]
    return command_config("probe", [*where, *SMALL, *words])


def test_a_probe_says_what_to_do(tmp_path, capsys):
    found = evaluate.probe_pair(composed(tmp_path))
    out = capsys.readouterr().out
    assert found.answer.text.split(":")[0] in " ".join(out.split())
    assert max(map(len, out[: out.index("numbers:")].splitlines())) <= 80
    assert found.answer.command.startswith("specheads ")
    written = json.loads((tmp_path / "probe.json").read_text())
    assert (
        written["answer"]["choice"] == found.answer.choice
        and written["overlap"]["value"] == found.overlap.value
    )
    assert (
        written["live"]["speedup"] == pytest.approx(found.live.speedup)
        and written["num_prompts"] == 6
    )
    assert [option["name"] for option in written["options"]][:2] == [
        "the target alone",
        "fixed length",
    ]
    # A second probe reads the same recordings.
    made = sorted((tmp_path / "data" / "recordings").iterdir())
    evaluate.probe_pair(composed(tmp_path))
    assert sorted((tmp_path / "data" / "recordings").iterdir()) == made and len(made) == 2


def test_the_next_command_has_the_same_prompts(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"instruction": f"Say {number}."}) for number in range(9)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    code, text, _ = run("probe", *SMALL, "data=alpaca", "data.path=mine.jsonl")
    (numbers,) = tmp_path.glob("outputs/probe/*/probe.json")
    *_, where, _, following = text.splitlines()
    assert code == 0 and where == f"numbers: {numbers.relative_to(tmp_path)}"
    assert following.startswith("next: specheads ")
    assert "data=alpaca data.path=mine.jsonl" in following
    assert following == f"next: {json.loads(numbers.read_text())['answer']['command']}"


def test_the_prompts_of_an_embedded_pair_have_no_file(run):
    code, _, error = run("probe", "model=nano", "data.path=mine.jsonl")
    assert code == 2 and "the chosen data set reads no file; add data=alpaca" in error


def test_own_prompts_are_read_from_a_file(tmp_path):
    rows = [json.dumps({"instruction": f"Say {number}.", "input": ""}) for number in range(9)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    data = evaluate._probed_prompts(
        composed(tmp_path, "data=alpaca", f"data.path={tmp_path / 'mine.jsonl'}")
    )
    prompts = list(data.source.load(False))
    assert [prompt.text for prompt in prompts] == [f"Say {number}." for number in range(6)]


def test_too_few_prompts_are_named(tmp_path):
    with pytest.raises(UserError, match="a probe needs 2; set num_prompts, data.num_dev"):
        evaluate.probe_pair(composed(tmp_path, "data.num_dev=1", "data.num_test=1"))
