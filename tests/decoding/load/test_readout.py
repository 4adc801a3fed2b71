"""Predictions before and after tokens are sampled."""

import numpy as np
import pytest
from load_drafts import drafts_of

from specheads import UserError
from specheads.decoding.load.readout import HeadAcceptance, LogisticAcceptance, ReadOut
from specheads.heads.calibration import IndexCalibration

BEFORE = LogisticAcceptance({"max_prob": 2.0, "bias": -0.5})
AFTER = LogisticAcceptance({"log_draft_prob": 1.0, "bias": 0.2})


def sigmoid(logits):
    return 1 / (1 + np.exp(-np.array(logits)))


def test_survival_reads_a_token_itself_only_for_the_tokens_after_it():
    probs, drawn = np.array([[0.5, 0.7, 0.9]]), np.array([[0.4, 0.1, 0.9]])
    read_out = ReadOut(BEFORE, AFTER)
    drafts = drafts_of({"max_prob": probs, "draft_prob": drawn})
    before, after = sigmoid(2 * probs - 0.5)[0], sigmoid(np.log(drawn) + 0.2)[0]
    expected = [before[0], after[0] * before[1], after[0] * after[1] * before[2]]
    assert read_out.survival(drafts)[0] == pytest.approx(expected)
    assert read_out.needs == {"max_prob", "draft_prob"}
    changed = drafts_of({"max_prob": probs, "draft_prob": np.array([[0.4, 0.1, 0.2]])})
    assert read_out.survival(changed).tolist() == read_out.survival(drafts).tolist()


def test_a_head_is_calibrated_by_the_place_in_the_round():
    head = HeadAcceptance("logits", IndexCalibration([2.0, 0.5], [1.0, -1.0]))
    drafts = drafts_of({"logits": [[0.3, 0.4, 0.6]]})
    assert head(drafts)[0] == pytest.approx(sigmoid([1.6, -0.8, -0.7]))
    assert head.needs == {"logits"}


@pytest.mark.parametrize("before", [AFTER, HeadAcceptance("logits", IndexCalibration.neutral())])
def test_a_prediction_that_reads_the_token_may_not_decide_on_it(before):
    with pytest.raises(UserError, match="reads the token whose submission it decides"):
        ReadOut(before, AFTER)


def test_a_head_that_predicts_before_sampling_may():
    overlap = HeadAcceptance("overlap", IndexCalibration.neutral(), reads_token=False)
    assert ReadOut(overlap, AFTER).needs == {"overlap", "draft_prob"}
