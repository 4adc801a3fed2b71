"""A head that is calibrated again, before an evaluation."""

import json

import pytest
import torch

from specheads import AcceptanceHead, HeadConfig, UserError
from specheads.commands.evaluate import _calibrate_again
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.settings import Evaluation
from specheads.heads.head import load_head, save_head
from specheads.prompts.prompt import ResponseLimits
from specheads.prompts.sources import NanoSource
from specheads.training.heads import calibrate as training_calibrate


@pytest.fixture
def folder(nano, tmp_path):
    torch.manual_seed(0)
    draft = {"id": nano.draft_id, "revision": nano.draft_revision}
    config = HeadConfig(nano.draft_lm.hidden_size, 0, draft=draft, recommended={"threshold": 0.4}, train={"epochs": 1})
    head = AcceptanceHead(config).eval().requires_grad_(False)
    torch.nn.init.normal_(head.readout.weight)
    return save_head(head, tmp_path / "mine")


def calibrated(nano, tmp_path, *heads):
    settings = Evaluation(num_dev_prompts=4, max_new_tokens=8, record={"num_samples": 2})
    data = PromptData(NanoSource(2, 6, 2), ResponseLimits())
    return _calibrate_again([str(head) for head in heads], nano, settings, data, tmp_path / "data")


def test_the_calibration_is_replaced_and_the_weights_stay(folder, nano, tmp_path, capsys):
    before = load_head(folder)
    errors = calibrated(nano, tmp_path, folder)
    after = load_head(folder)
    assert torch.equal(before.readout.weight, after.readout.weight)
    assert before.config.calibration is None and len(after.config.calibration["slope"]) > 1
    assert after.config.recommended is None  # it was for other predictions
    assert after.config.train["epochs"] == 1 and after.config.train["dev_ece"] == errors["mine"]
    assert 0 < errors["mine"]["cross_fitted"] < 1 and 0 < errors["mine"]["raw"] < 1
    out = capsys.readouterr().out
    assert "mine: expected calibration error" in out and "uncalibrated" in out and f"{folder} calibrated" in out


@pytest.mark.parametrize(("error", "replaced"), [(0.0, True), (1.0, False)])
def test_a_calibration_is_replaced_only_by_a_better_one(error, replaced, folder, nano, tmp_path, monkeypatch, capsys):
    content = json.loads((folder / "config.json").read_text()) | {"calibration": {"slope": [2.0], "intercept": [0.0]}}
    (folder / "config.json").write_text(json.dumps(content))
    before = load_head(folder).config
    monkeypatch.setattr(training_calibrate, "cross_fitted_error", lambda *args: error)
    errors = calibrated(nano, tmp_path, folder)["mine"]
    after, out = load_head(folder).config, capsys.readouterr().out
    assert f"{errors['before']:.1%} with its calibration" in out and errors["before"] != errors["raw"]
    assert (after.calibration != before.calibration) == (after.recommended is None) == replaced
    assert ("left as it is" in out) != replaced and (f"{folder} calibrated" in out) == replaced


def test_heads_that_cannot_be_written_are_refused(nano, tmp_path):
    with pytest.raises(UserError, match="head=some/hub-id is on the hub, .* local folder"):
        calibrated(nano, tmp_path, "some/hub-id")
    with pytest.raises(UserError, match="calibrate=true needs a head"):
        calibrated(nano, tmp_path)
