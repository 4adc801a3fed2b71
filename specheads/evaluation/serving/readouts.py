"""Fits of read-outs and of samples of survival to a recording of dev prompts."""

from collections.abc import Sequence

import numpy as np

from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.plan import SurvivalSample
from specheads.decoding.load.readout import HeadAcceptance, LogisticAcceptance, ReadOut
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.serving.recorded_drafts import RecordedDrafts, Rows
from specheads.evaluation.tuning import Tuning
from specheads.heads.calibration import IndexCalibration
from specheads.heads.head import AcceptanceHead
from specheads.replay.recording import Recording
from specheads.replay.replay import RecordedHead, recorded_head, recorded_overlap

BEFORE = ("logit_max_prob", "max_prob", "entropy", "bias")
AFTER = ("logit_max_prob", "log_draft_prob", "max_prob", "entropy", "bias")
NUM_DRAFTS = 1024  # of a sample of survival


def fitted_logistic(dev: Recording, names: Sequence[str]) -> LogisticAcceptance:
    """Return the logistic of the draft's confidence that fits the tokens of dev prompts; for `names` see `logistic_inputs`."""
    return LogisticAcceptance(Tuning(dev, CostTable({})).logistic(names))


def confidence_read_out(dev: Recording) -> ReadOut:
    """Return the read-out that needs no head."""
    return ReadOut(fitted_logistic(dev, BEFORE), fitted_logistic(dev, AFTER))


def read_out_of(dev: Recording, head: AcceptanceHead) -> ReadOut:
    """Return the read-out of a look-ahead head with all that it predicts; the recording has its predictions."""
    return head_read_out(dev, recorded_head(head), recorded_overlap(head) if head.config.overlap else None)


def head_read_out(dev: Recording, head: RecordedHead, overlap: RecordedHead | None = None) -> ReadOut:
    """Return the read-out of a look-ahead head, whose predictions the recording has.

    `overlap`: its predictions before sampling; None: confidence predicts there.
    """
    before = fitted_logistic(dev, BEFORE) if overlap is None else _acceptance(overlap, reads_token=False)
    return ReadOut(before, _acceptance(head, reads_token=True))


def _acceptance(head: RecordedHead, reads_token: bool) -> HeadAcceptance:
    return HeadAcceptance(head.name, IndexCalibration.from_dict(head.config.calibration), reads_token)


def survival_sample(dev: Recording, read_out: ReadOut, max_tokens: int, seed: int = 0) -> SurvivalSample:
    """Return the survival of drafts from random positions of dev prompts' responses; 0 after the end of a draft."""
    rng, recorded = np.random.default_rng(seed), RecordedDrafts(dev, read_out.needs)
    position = rng.integers(dev.accepted.shape[1], size=NUM_DRAFTS)
    prompt = np.searchsorted(recorded.first, position, side="right") - 1
    rows = Rows.at(prompt, rng.integers(dev.num_samples, size=NUM_DRAFTS), position - recorded.first[prompt])
    features = {name: np.ones((NUM_DRAFTS, max_tokens)) for name in recorded.needs}
    lengths, capacity = np.zeros(NUM_DRAFTS, dtype=np.int64), recorded.capacity(rows)
    ended = np.zeros(NUM_DRAFTS, dtype=bool)
    for step in range(max_tokens):
        which = np.flatnonzero(~ended & (capacity > step))
        values, ends = recorded.draft(rows, which, step)
        for name, column in values.items():
            features[name][which, step] = column
        lengths[which] += 1
        ended[np.setdiff1d(np.arange(NUM_DRAFTS), which)] = True
        ended[which] |= ends
    drafts = Drafts(np.arange(NUM_DRAFTS), lengths, capacity, np.ones_like(lengths), features)
    return SurvivalSample(np.where(drafts.places, read_out.survival(drafts), 0.0))
