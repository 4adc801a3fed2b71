"""A head that is calibrated again, before an evaluation."""

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
    settings = Evaluation(
        num_dev_prompts=4,
        max_new_tokens=8,
        record={"num_samples": 2},
        warp={"temperature": 1.0},
    )
    data = PromptData(NanoSource(2, 6, 2), ResponseLimits())
    settings = settings.for_pair(nano)
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
        and " before, " in out
        and f"{folder} calibrated" in out
    )


def test_an_earlier_calibration_that_is_as_good_stays(folder, nano, tmp_path, capsys):
    calibrated(nano, tmp_path, folder)
    before = load_head(folder).config
    capsys.readouterr()
    found = calibrated(nano, tmp_path, folder)["mine"]
    assert not found.used and "before" in found.ece and load_head(folder).config == before
    out = capsys.readouterr().out
    assert " before, " in out and "unchanged: that is not better" in out


def test_heads_that_cannot_be_written_are_refused(nano, tmp_path):
    with pytest.raises(UserError, match="calibrate=true needs head=<folder>, a local one"):
        calibrated(nano, tmp_path, "some/hub-id")
    with pytest.raises(UserError, match="calibrate=true needs head=<folder>"):
        calibrated(nano, tmp_path)
