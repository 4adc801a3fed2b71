"""A prompt on which a model's logits are NaN is left out and named, and the others are made."""

import copy
import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from families import family_pair

from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.errors import UserError
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt, ResponseLimits, encode_prompts
from specheads.replay.recording import Recorder
from specheads.replay.response_tree import RecordSettings

READ = 20  # positions from this on are NaN in a broken model
SETTINGS = DataGeneration(max_new_tokens=6, rows_per_shard=7, warp=Warp(1.0), batch_size=4)


def broken_pair(role):
    """A pair one of whose models reads no longer texts."""
    pair = family_pair("opt")
    model = copy.deepcopy(getattr(pair, role))
    with torch.no_grad():
        model.model.decoder.embed_positions.weight[READ:] = float("nan")
    return replace(pair, **{role: model}, **{f"{role}_revision": "broken"})


def prompts(num_long, number=40):
    made = []
    for place in range(number):
        text = "abcdefghij"[place % 10] + "abcdefghij"[place // 10]
        if place % 13 == 5 and place // 13 < num_long:
            text += "k" * READ
        made.append(Prompt(str(place), "train", text, place=f"line {place + 1}"))
    return made


def rows_of(folder):
    return [
        row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_prompt_that_fails_is_left_out_and_named(tmp_path, caplog, role):
    whole = generate_data(family_pair("opt"), prompts(0), SETTINGS, tmp_path / "whole")
    caplog.clear()
    made = generate_data(broken_pair(role), prompts(2), SETTINGS, tmp_path / "data")
    kept = {row["prompt_id"]: row for row in rows_of(made)}
    assert kept == {row["prompt_id"]: row for row in rows_of(whole) if row["prompt_id"] in kept}
    assert set(map(str, range(40))) - kept.keys() == {"5", "18"}
    said = [message for message in caplog.messages if "is left out: opt-" in message]
    assert [message.split(" is left out")[0] for message in said] == [
        "data: line 6",
        "data: line 19",
    ]
    assert all(f"opt-{role} produced NaN logits" in message for message in said)
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("data/*/manifest.json")]
    counts = sorted(manifest.get("left_out", 0) for manifest in manifests)
    # A target's failures are left out of the responses, and so of the labels
    assert counts == ([2, 2] if role == "target" else [0, 2])
    assert "data: 2 of 40 rows are left out of" in caplog.text
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("data/*/*.parquet")}
    assert generate_data(broken_pair(role), prompts(2), SETTINGS, tmp_path / "data") == made
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("data/*/*.parquet")}


@pytest.mark.parametrize("role", ["target", "draft"])
def test_more_than_a_twentieth_is_an_error_which_loses_nothing(tmp_path, role):
    for _ in range(2):
        with pytest.raises(UserError, match="3 of 40 rows are left out .* more than one in 20.*"):
            generate_data(broken_pair(role), prompts(3), SETTINGS, tmp_path)
    assert rows_of(next(tmp_path.iterdir()))


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("target", "line 6 cannot be recorded: opt-target produced NaN"),
        ("draft", "line 6: opt-draft produced NaN"),
    ],
)
def test_a_recording_names_the_prompt_that_fails(tmp_path, role, message):
    pair = broken_pair(role)
    limits = ResponseLimits(max_new_tokens=6)
    recorder = Recorder(pair, Warp(1.0), limits, RecordSettings(), 0, tmp_path)
    with pytest.raises(UserError, match=message):
        recorder.record([encode_prompts(pair, prompts(1), limits)])
