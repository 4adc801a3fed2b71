"""A head that is calibrated again, before an evaluation."""

import json
from dataclasses import replace

import pytest
import torch

from specheads import AcceptanceHead, HeadConfig, UserError
from specheads.commands.evaluate import _calibrate_again
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.settings import Evaluation
from specheads.heads.calibration import FORMS
from specheads.heads.head import load_head, save_head
from specheads.prompts.prompt import ResponseLimits
from specheads.prompts.sources import NanoSource
from specheads.training.heads import calibrate as training_calibrate


@pytest.fixture
def folder(nano, tmp_path):
    torch.manual_seed(0)
    draft = {"id": nano.draft_id, "revision": nano.draft_revision}
    config = HeadConfig(
        nano.draft_lm.hidden_size,
        0,
        draft=draft,
        recommended={"threshold": 0.4},
        train={"epochs": 1},
    )
    head = AcceptanceHead(config).eval().requires_grad_(False)
    torch.nn.init.normal_(head.readout.weight, std=5.0)
    return save_head(head, tmp_path / "mine")


def calibrated(nano, tmp_path, *heads):
    settings = Evaluation(num_dev_prompts=4, max_new_tokens=8, record={"num_samples": 2})
    data = PromptData(NanoSource(2, 6, 2), ResponseLimits())
    return _calibrate_again([str(head) for head in heads], nano, settings, data, tmp_path / "data")


def test_the_calibration_is_replaced_and_the_weights_stay(folder, nano, tmp_path, capsys):
    before = load_head(folder)
    found = calibrated(nano, tmp_path, folder)["mine"]
    after = load_head(folder)
    assert found.used and torch.equal(before.readout.weight, after.readout.weight)
    assert (
        before.config.calibration is None
        and len(after.config.calibration["slope"]) == FORMS[found.best][0]
    )
    assert after.config.recommended is None  # it was for other predictions
    assert after.config.train["epochs"] == 1 and after.config.train["dev_ece"] == found.ece
    assert 0 < found.ece["cross_fitted"] < found.ece["raw"] < 1
    out = capsys.readouterr().out
    assert (
        "mine: calibration error and log loss" in out
        and "uncalibrated" in out
        and f"{folder} calibrated" in out
    )


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("earlier", [None, {"slope": [2.0], "intercept": [0.0]}])
def test_what_is_not_clearly_better_is_not_used(
    used, earlier, folder, nano, tmp_path, monkeypatch, capsys
):
    content = json.loads((folder / "config.json").read_text()) | {"calibration": earlier}
    (folder / "config.json").write_text(json.dumps(content))
    before = load_head(folder).config
    real = training_calibrate.compared
    monkeypatch.setattr(
        training_calibrate, "compared", lambda *args: replace(real(*args), used=used)
    )
    found = calibrated(nano, tmp_path, folder)["mine"]
    after = load_head(folder).config
    out = capsys.readouterr().out
    assert ("before" in found.ece) == (earlier is not None) and ("with its calibration" in out) == (
        earlier is not None
    )
    assert (after.calibration != before.calibration) == (after.recommended is None) == used
    assert ("left as it is" in out) != used and (f"{folder} calibrated" in out) == used


def test_heads_that_cannot_be_written_are_refused(nano, tmp_path):
    with pytest.raises(UserError, match="head=some/hub-id is on the hub, .* local folder"):
        calibrated(nano, tmp_path, "some/hub-id")
    with pytest.raises(UserError, match="calibrate=true needs a head"):
        calibrated(nano, tmp_path)
