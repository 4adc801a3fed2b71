"""A head that is calibrated again, by the command."""

import json

import pytest
import torch
from hydra import compose, initialize_config_dir

from specheads import AcceptanceHead, HeadConfig, UserError
from specheads.commands import calibration
from specheads.heads.checkpoint import load_head, save_head
from specheads.pair_config import config_folder
from specheads.training.heads import calibrate as training_calibrate


@pytest.fixture
def folder(nano, tmp_path):
    torch.manual_seed(0)
    draft = {"id": nano.draft_id, "revision": nano.draft_revision}
    config = HeadConfig(nano.draft_lm.hidden_size, 0, draft=draft, recommended={"threshold": 0.4}, train={"epochs": 1})
    head = AcceptanceHead(config).eval().requires_grad_(False)
    torch.nn.init.normal_(head.readout.weight)
    return save_head(head, tmp_path / "mine")


def calibrated(monkeypatch, nano, tmp_path, head, *words):
    monkeypatch.setattr(calibration, "load_configured_pair", lambda cfg: nano)
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        small = ["calibration.num_prompts=4", "max_new_tokens=8", "calibration.num_samples=2", "data.num_dev=6"]
        where = [f"head={head}", f"paths.data={tmp_path}/data", "paths.run=none"]
        cfg = compose("calibrate", ["model=nano", *where, *small, *words])
    return calibration.recalibrate(cfg)


def test_the_calibration_is_replaced_and_the_weights_stay(folder, nano, tmp_path, monkeypatch, capsys):
    before = load_head(folder)
    (folder / "speculation_profile.json").write_text("{}")
    errors = calibrated(monkeypatch, nano, tmp_path, folder)
    assert not (folder / "speculation_profile.json").exists()  # it was of the earlier calibration
    after = load_head(folder)
    assert torch.equal(before.readout.weight, after.readout.weight)
    assert before.config.calibration is None and len(after.config.calibration["slope"]) > 1
    assert after.config.recommended is None  # it was for other predictions
    assert after.config.train["epochs"] == 1 and after.config.train["dev_ece"] == errors["mine"]
    assert 0 < errors["mine"]["cross_fitted"] < 1 and 0 < errors["mine"]["raw"] < 1
    out = capsys.readouterr().out
    assert "mine: expected calibration error" in out and "uncalibrated" in out and f"specheads evaluate head={folder}" in out


@pytest.mark.parametrize(("error", "replaced"), [(0.0, True), (1.0, False)])
def test_a_calibration_is_replaced_only_by_a_better_one(error, replaced, folder, nano, tmp_path, monkeypatch, capsys):
    content = json.loads((folder / "config.json").read_text()) | {"calibration": {"slope": [2.0], "intercept": [0.0]}}
    (folder / "config.json").write_text(json.dumps(content))
    before = load_head(folder).config
    monkeypatch.setattr(training_calibrate, "cross_fitted_error", lambda *args: error)
    errors = calibrated(monkeypatch, nano, tmp_path, folder)["mine"]
    after, out = load_head(folder).config, capsys.readouterr().out
    assert f"{errors['before']:.1%} with its calibration" in out and errors["before"] != errors["raw"]
    assert (after.calibration != before.calibration) == (after.recommended is None) == replaced
    assert ("left as it is" in out) != replaced and ("recommends a threshold" in out) == replaced


def test_a_head_elsewhere_is_refused(folder, nano, tmp_path, monkeypatch):
    located = calibration.find_heads(str(folder), nano, tmp_path, calibration.Warp())
    (name, each), *_ = located.items()
    monkeypatch.setattr(calibration, "find_heads", lambda *args: {name: calibration.replace(each, where="some/hub-id")})
    with pytest.raises(UserError, match="head=some/hub-id is on the hub, .* local folder"):
        calibrated(monkeypatch, nano, tmp_path, folder)
