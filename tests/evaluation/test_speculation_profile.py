"""The numbers in a speculation profile, its file, and simulations that read it."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from jsonschema import Draft202012Validator
from random_recording import random_recording

from specheads import AcceptanceHead, HeadConfig, UserError
from specheads.commands import speculation_profile as command
from specheads.decoding.stopping import MAX_TOKENS
from specheads.evaluation import speculation_profile
from specheads.evaluation.intervals import Interval
from specheads.evaluation.speculation_profile import FILE, HeadProfile, Profile, SetProfile, read_profile, set_profile
from specheads.heads.checkpoint import save_head
from specheads.pair_config import config_folder

SCHEMA = json.loads((Path(speculation_profile.__file__).parent / "speculation_profile.schema.json").read_text())
SMALL = ["data.num_test=4", "data.num_dev=2", "num_prompts=4", "max_new_tokens=16", "num_samples=2"]


def away(each, value):
    """How many standard errors an estimate is away from a value, by its 95 % interval."""
    return abs(each.value - value) / ((each.high - each.low) / 3.92 + 1e-12)


@pytest.fixture(scope="module")
def independent():
    """The profile of drafts whose tokens are accepted with probability 0.6, whatever came before."""
    recording = random_recording(num_prompts=150, num_samples=3, max_tokens=MAX_TOKENS, acceptance=0.6, longest=200)
    return set_profile("any", {"role": "test"}, recording, recording.num_prompts)


def test_independent_tokens_follow_the_formulas(independent):
    assert len(independent.acceptance) == len(independent.tokens_per_round) == MAX_TOKENS
    for length in range(1, 7):
        assert away(independent.acceptance[length - 1], 0.6) < 5
        assert away(independent.survival[length - 1], 0.6**length) < 5
        # A response's last round is cut, and there are some fifty in each.
        expected = (1 - 0.6 ** (length + 1)) / 0.4
        assert independent.tokens_per_round[length - 1].value == pytest.approx(expected, rel=0.04)


def test_intervals_are_over_groups(independent):
    recording = random_recording(num_prompts=150, num_samples=3, max_tokens=MAX_TOKENS, acceptance=0.6, longest=200)
    grouped = set_profile("any", {}, recording, [number // 75 for number in range(150)])
    assert grouped.acceptance[0].value == independent.acceptance[0].value
    assert grouped.acceptance[0].high - grouped.acceptance[0].low < independent.acceptance[0].high - independent.acceptance[0].low


def profile_of(profile):
    pair = {"draft": {"id": "small", "revision": "1"}, "target": {"id": "large", "revision": "2"}}
    return Profile(pair, {"temperature": 1.0}, {"seed": 0}, [profile], {"torch": "2"})


def test_a_file_is_read_as_it_was_written(independent, tmp_path):
    profile = profile_of(independent)
    assert profile.write(tmp_path) == tmp_path / FILE and read_profile(tmp_path / FILE) == profile


def test_the_schema_describes_every_field(independent, tmp_path):
    Draft202012Validator.check_schema(SCHEMA)
    known = Interval(2.0, 1.0, 3.0)
    head = HeadProfile(0.5, 8, known, known, 0.01, [0.1, 0.9], [0.1, 0.9], [0.5, 0.5])
    described = {role: {"id": role, "revision": "1", "dtype": "torch.float32"} for role in ("draft", "target")}
    profile = replace(profile_of(replace(independent, head=head)), pair=described)
    content = json.loads(profile.write(tmp_path).read_text())
    Draft202012Validator(SCHEMA).validate(content)
    definitions = {"set": SetProfile, "head": HeadProfile}
    for name, cls in definitions.items():
        assert [field.name for field in fields(cls)] == list(SCHEMA["$defs"][name]["properties"])
    assert {"format", "verification", *(field.name for field in fields(Profile))} == SCHEMA["properties"].keys()
    content["sets"][0]["head"].pop("share")
    assert not Draft202012Validator(SCHEMA).is_valid(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(format=2),
        lambda content: content.pop("sets"),
        lambda content: content["sets"][0].pop("acceptance"),
        lambda content: content["sets"][0]["acceptance"].pop(),
        lambda content: content["sets"][0]["acceptance"][3].update(value=1.5),
        lambda content: content["sets"][0].update(more=1),
        lambda content: content.update(sets="none"),
    ],
)
def test_other_files_are_refused(independent, tmp_path, change):
    path = profile_of(independent).write(tmp_path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"is no speculation profile of format 1; specheads profile writes one"):
        read_profile(path)
    path.write_text("{")
    with pytest.raises(UserError, match="is no speculation profile"):
        read_profile(path)
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        read_profile(tmp_path / "none.json")


def composed(name, *words):
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        return compose(name, ["model=nano", *words])


def test_the_command_writes_it_beside_the_head(nano, tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    draft = {"id": nano.draft_id, "revision": nano.draft_revision}
    head = AcceptanceHead(HeadConfig(nano.draft_lm.hidden_size, 0, draft=draft, recommended={"threshold": 0.4, "max_tokens": 5}))
    torch.nn.init.normal_(head.readout.weight)
    folder = save_head(head.eval().requires_grad_(False), tmp_path / "mine")
    monkeypatch.setattr(command, "load_configured_pair", lambda cfg: nano)
    where = [f"paths.data={tmp_path}/data", f"paths.run={tmp_path}/run"]
    path = command.write_profile(composed("profile", f"head={folder}", *where, *SMALL))
    profile = read_profile(path)
    Draft202012Validator(SCHEMA).validate(json.loads(path.read_text()))
    assert path == folder / FILE and profile.pair["draft"] | draft == profile.pair["draft"]
    (of_set,) = profile.sets
    assert of_set.prompts["num_prompts"] == 4 and of_set.prompts["role"] == "test"
    known = of_set.head
    assert (known.threshold, known.max_tokens) == (0.4, 5)
    assert 1 <= known.tokens_per_round.value <= 1 + known.drafted_per_round.value <= 6
    assert 0 <= known.expected_calibration_error <= 1 and sum(known.share) == pytest.approx(1)
    assert "tokens per round" in capsys.readouterr().out
    alone = read_profile(command.write_profile(composed("profile", *where, *SMALL)))
    assert alone.sets == [replace(of_set, head=None)] and (tmp_path / "run" / FILE).is_file()


def test_several_heads_are_refused(nano, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load_configured_pair", lambda cfg: nano)
    monkeypatch.setattr(command, "find_heads", lambda *given: {"a": None, "b": None})
    with pytest.raises(UserError, match="holds 2 heads, and a profile is of one: a, b"):
        command.write_profile(composed("profile", "head=bank", f"paths.data={tmp_path}/data", f"paths.run={tmp_path}", *SMALL))
