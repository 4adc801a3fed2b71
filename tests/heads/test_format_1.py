"""Heads that were exported before `judges` was renamed to `predicts` are read everywhere, to the same logits.

The folders in fixtures/format_1 were written by the version before.
"""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
import torch
from fakes import tiny_pair
from safetensors.torch import load_file

from specheads import load_head, save_head, stopping
from specheads.commands import export
from specheads.heads import config as config_module
from specheads.heads.head import latest_head
from specheads.heads.portable.loaders import STANDALONE, write_loader
from specheads.heads.portable.standalone_head import DraftRound, StandaloneHead

FIXTURES = Path(__file__).parent / "fixtures" / "format_1"
KINDS = sorted(path.name for path in FIXTURES.iterdir())
SCHEMA = json.loads(Path(config_module.__file__).with_name("head.schema.json").read_text())


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def folder(kind, tmp_path):
    return shutil.copytree(FIXTURES / kind, tmp_path / "heads" / kind)


def golden(folder):
    return load_file(folder / "golden.safetensors")


def test_the_fixtures_are_of_format_1(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["format_version"] == 1 and "judges" in config and "predicts" not in config
    jsonschema.validate(config, SCHEMA)


def test_a_head_of_format_1_has_the_same_logits(folder, kind):
    head = load_head(folder)
    assert head.config.predicts == kind
    torch.testing.assert_close(head.score(golden(folder)["inputs"]), golden(folder)["logits"], atol=1e-6, rtol=1e-6)
    assert head.train_prompts is not None and len(head.train_prompts.train) == 2
    assert head.config.calibration == {"slope": [1.5, 0.75], "intercept": [0.25, -0.25]}
    assert stopping.HeadThreshold(head, threshold=0.6).max_tokens == 20


def test_saving_makes_it_a_head_of_the_present_format(folder, tmp_path, kind):
    saved = save_head(load_head(folder), tmp_path / "saved")
    config = json.loads((saved / "config.json").read_text())
    assert config["format_version"] == config_module.FORMAT_VERSION and config["predicts"] == kind and "judges" not in config
    jsonschema.validate(config, SCHEMA)
    ours, theirs = (load_file(where / "model.safetensors") for where in (saved, folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(golden(saved)["inputs"], golden(folder)["inputs"])


def test_the_standalone_loader_reads_it(folder, kind):
    write_loader(folder, STANDALONE)
    head = StandaloneHead.load(folder)
    assert head.config["predicts"] == kind
    torch.testing.assert_close(head.score(golden(folder)["inputs"]), golden(folder)["logits"], atol=1e-6, rtol=1e-6)
    assert DraftRound(head).min_tokens == (2 if kind == "input_token" else 1)


def test_the_command_reads_and_exports_it(folder, kind):
    described = export.run([f"head={folder}"])
    assert f"predicts        {kind}" in described and "unchanged since its export" in described
    assert "head.onnx written" in export.run([f"head={folder}", "format=onnx"])


def test_it_is_found_as_the_latest(folder, tmp_path):
    assert latest_head(tmp_path, tiny_pair(5)) == folder
