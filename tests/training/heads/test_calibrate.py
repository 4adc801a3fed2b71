"""Heads that are calibrated on recordings of a real pair: which prompts, and what is written."""

import logging

import pytest
import torch

from specheads.errors import UserError
from specheads.heads.calibration import FORMS, IndexCalibration
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.heads.train_prompts import TrainPrompts, text_hash
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt, ResponseLimits, encode_prompts, groups_of
from specheads.prompts.sources import NanoSource
from specheads.replay.calibration import compared
from specheads.replay.recording import Recorder, load_recording
from specheads.replay.replay import head_logits, recorded_head
from specheads.replay.response_tree import RecordSettings
from specheads.training.heads.calibrate import calibrate, unknown_prompts

NUM_PROMPTS = 4
LIMITS = ResponseLimits(max_new_tokens=8)


@pytest.fixture(scope="module")
def dev(nano):
    prompts = NanoSource(2, 6, 2).load(chats=False)
    return encode_prompts(nano, [prompt for prompt in prompts if prompt.split == "dev"], LIMITS)


@pytest.fixture(scope="module")
def recorder(nano, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return Recorder(nano, Warp(), LIMITS, RecordSettings(2), 0, folder)


def new_head(nano, folder, spread, learned=("learned",), **config):
    """A head whose logits are 1 and a random number of this spread."""
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(nano.draft_lm.hidden_size, 0, **config))
    torch.nn.init.normal_(head.readout.weight, std=spread)
    torch.nn.init.constant_(head.readout.bias, 1.0)
    head.train_prompts = TrainPrompts.of(learned)
    return save_head(head.eval().requires_grad_(False), folder)


def contents(folder):
    return {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_head_gets_the_best_form_where_that_is_clearly_better(
    nano, dev, recorder, tmp_path, caplog, monkeypatch
):
    """One that errs gets it and loses its threshold; others are noted, or stay as they are."""
    monkeypatch.setenv("SPECHEADS_ENGINE", "eager")  # a compiled step would serve four prompts
    caplog.set_level(logging.INFO)
    given = {"recommended": {"threshold": 0.4}, "train": {"num_prompts": 7}}
    wrong = new_head(nano, tmp_path / "wrong", 5.0, **given)
    fair = new_head(nano, tmp_path / "fair", 1e-3, **given)
    found, known = calibrate(NUM_PROMPTS, recorder, dev, [wrong, fair])
    assert "calibrating 2 heads on 4 dev prompts" in caplog.messages
    assert found["wrong"].used and not found["fair"].used
    assert known.explained.keys() > {"wrong", "fair"}

    head = recorded_head(load_head(wrong))
    (path,) = recorder.folder.glob("recordings/*")
    recording = load_recording(path, [head.name])
    logits, tokens = head_logits(recording, head)
    given = logits, tokens.accepted, tokens.indices
    prompts = dev[:NUM_PROMPTS]
    groups = groups_of(prompt for prompt, _ in prompts)
    expected = compared(*given, recording.prompt_of(tokens.node), groups)
    assert found["wrong"] == expected
    fitted = IndexCalibration.fit(*given, *FORMS[expected.best])
    for folder, calibration, recommended in (
        (wrong, fitted.to_dict(), None),
        (fair, None, {"threshold": 0.4}),
    ):
        head = load_head(folder)
        result = found[folder.name]
        errors = {"dev_ece": result.ece, "dev_log_loss": result.log_loss}
        assert head.config.calibration == calibration
        assert head.config.recommended == recommended
        assert head.config.train.items() >= ({"num_prompts": 7} | errors).items()
        assert head.train_prompts.train.tolist() == [text_hash("learned")]
        assert head.train_prompts.dev.tolist() == sorted(
            text_hash(prompt.text) for prompt, _ in prompts
        )

    before = contents(wrong)
    again, _ = calibrate(NUM_PROMPTS, recorder, dev, [wrong])
    assert not again["wrong"].used and [*again["wrong"].ece] == ["raw", "before", "cross_fitted"]
    assert contents(wrong) == before


def test_heads_are_calibrated_on_dev_prompts_that_none_has_learned():
    heads = []
    for learned in (TrainPrompts.of(["A  b"]), None, TrainPrompts.of(["e"], ["d"])):
        head = AcceptanceHead(HeadConfig(4, 0))
        head.train_prompts = learned
        heads.append(head)
    dev = [(Prompt(text, "dev", text), [1]) for text in ("a b", "d", "e", "f")]
    for count, expected in ((1, ["d"]), (2, ["d", "f"]), (9, ["d", "f"])):
        found = unknown_prompts(count, dev, heads)
        assert [prompt.text for prompt, _ in found] == expected
    with pytest.raises(UserError, match="none among 2; raise data.num_dev.*calibration=null"):
        unknown_prompts(9, [dev[0], dev[2]], heads)
