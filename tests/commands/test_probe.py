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


def test_the_next_command_has_the_same_prompts(tmp_path, capsys):
    rows = [json.dumps({"instruction": f"Say {number}."}) for number in range(9)]
    (file := tmp_path / "mine.jsonl").write_text("\n".join(rows))
    found = evaluate.probe_pair(composed(tmp_path, "data=alpaca", f"prompts={file}"))
    assert f" data.path={file}" in found.answer.command
    *_, numbers, following = capsys.readouterr().out.splitlines()
    assert numbers == f"numbers: {tmp_path / 'probe.json'}"
    assert following == f"next: {found.answer.command}"


def test_own_prompts_are_read_from_a_file(tmp_path):
    rows = [json.dumps({"instruction": f"Say {number}.", "input": ""}) for number in range(9)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    data = evaluate._probed_prompts(
        composed(tmp_path, "data=alpaca", f"prompts={tmp_path / 'mine.jsonl'}")
    )
    prompts = list(data.source.load(False))
    assert [prompt.text for prompt in prompts] == [f"Say {number}." for number in range(6)]
    with pytest.raises(UserError, match="reads no file; add data=alpaca"):
        evaluate._probed_prompts(composed(tmp_path, f"prompts={tmp_path / 'mine.jsonl'}"))


def test_too_few_prompts_are_named(tmp_path):
    with pytest.raises(UserError, match="a probe needs 2; set num_prompts, data.num_dev"):
        evaluate.probe_pair(composed(tmp_path, "data.num_dev=1", "data.num_test=1"))
