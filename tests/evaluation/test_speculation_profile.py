"""The numbers in a speculation profile, its file, and simulations that read it."""

import json
from pathlib import Path

import pytest
import torch
from fakes import FewPrompts
from jsonschema import Draft202012Validator
from random_recording import random_recording

from specheads import AcceptanceHead, HeadConfig
from specheads.decoding.stopping import MAX_TOKENS
from specheads.evaluation import speculation_profile
from specheads.evaluation.evaluate import evaluate
from specheads.evaluation.head_folders import LocatedHead
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.replayed_sets import RecordedSet
from specheads.evaluation.settings import Evaluation, RecordingSettings
from specheads.evaluation.speculation_profile import set_profile
from specheads.heads.head import load_head, save_head
from specheads.heads.head_folder import PROFILE_FILE

SCHEMA = json.loads((Path(speculation_profile.__file__).parent / "speculation_profile.schema.json").read_text())


def away(each, value):
    """How many standard errors an estimate is away from a value, by its 95 % interval."""
    return abs(each.value - value) / ((each.high - each.low) / 3.92 + 1e-12)


@pytest.fixture(scope="module")
def independent():
    """The profile of drafts whose tokens are accepted with probability 0.6, whatever came before."""
    recording = random_recording(num_prompts=100, num_samples=2, max_tokens=MAX_TOKENS, acceptance=0.6, longest=200)
    return set_profile({"role": "test"}, RecordedSet("any", "test", recording))


def test_independent_tokens_follow_the_formulas(independent):
    assert len(independent["acceptance"]) == len(independent["tokens_per_round"]) == MAX_TOKENS
    for length in range(1, 7):
        assert away(independent["acceptance"][length - 1], 0.6) < 5
        assert away(independent["survival"][length - 1], 0.6**length) < 5
        # A response's last round is cut, and there are some fifty in each.
        expected = (1 - 0.6 ** (length + 1)) / 0.4
        assert independent["tokens_per_round"][length - 1].value == pytest.approx(expected, rel=0.04)


def test_intervals_are_over_groups(independent):
    recording = random_recording(num_prompts=100, num_samples=2, max_tokens=MAX_TOKENS, acceptance=0.6, longest=200)
    grouped = set_profile({}, RecordedSet("any", "test", recording, groups=[number // 50 for number in range(100)]))
    assert grouped["acceptance"][0].value == independent["acceptance"][0].value
    assert (
        grouped["acceptance"][0].high - grouped["acceptance"][0].low
        < independent["acceptance"][0].high - independent["acceptance"][0].low
    )


def test_an_evaluation_writes_it_next_to_the_head_or_into_its_own_folder(nano, tmp_path):
    torch.manual_seed(0)
    draft = {"id": nano.draft_id, "revision": nano.draft_revision}
    head = AcceptanceHead(HeadConfig(nano.draft_lm.hidden_size, 0, draft=draft, recommended={"threshold": 0.4, "max_tokens": 5}))
    torch.nn.init.normal_(head.readout.weight)
    folder = save_head(head.eval().requires_grad_(False), tmp_path / "mine")
    small = {"num_prompts": 4, "num_dev_prompts": 2, "max_new_tokens": 16, "fixed_lengths": (1, 3), "thresholds": (0.4,)}
    settings = Evaluation(**small, live="none", ratios=(10,), record=RecordingSettings(num_samples=2))
    located = {"mine": LocatedHead(load_head(folder), str(folder))}
    evaluate(nano, located, settings, PromptData(FewPrompts()), (tmp_path / "data", tmp_path / "run"))
    content = json.loads((folder / PROFILE_FILE).read_text())
    Draft202012Validator.check_schema(SCHEMA)
    Draft202012Validator(SCHEMA).validate(content)
    assert content.keys() == SCHEMA["properties"].keys()
    for name, described in {"set": content["sets"][0], "head": content["sets"][0]["head"]}.items():
        assert list(described) == list(SCHEMA["$defs"][name]["properties"])
    assert content["pair"]["draft"]["id"] == nano.draft_id and content["pair"]["head"]["id"] == "mine"
    (of_set,) = content["sets"]
    assert of_set["prompts"]["num_prompts"] == 4 and of_set["prompts"]["role"] == "test"
    known = of_set["head"]
    incomplete = content | {"sets": [of_set | {"head": {name: value for name, value in known.items() if name != "share"}}]}
    assert not Draft202012Validator(SCHEMA).is_valid(incomplete)
    assert known["max_tokens"] <= MAX_TOKENS
    assert 1 <= known["tokens_per_round"]["value"] <= 1 + known["drafted_per_round"]["value"]
    assert 0 <= known["expected_calibration_error"] <= 1 and sum(known["share"]) == pytest.approx(1)
    evaluate(nano, {}, settings, PromptData(FewPrompts()), (tmp_path / "data", tmp_path / "run"))
    alone = json.loads((tmp_path / "run" / PROFILE_FILE).read_text())
    assert alone["sets"] == [of_set | {"head": None}] and alone["pair"].keys() == {"draft", "target"}
