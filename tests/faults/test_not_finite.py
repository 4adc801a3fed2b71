"""NaN and infinity in either model's logits, at any step of all that reads them: one message with
the model, nothing written.
"""

import itertools
import re

import numpy as np
import pytest
import torch
from fakes import tiny_pair

from specheads import Warp, papers
from specheads.data_gen.shard_rows import label_responses
from specheads.decoding import stopping, verification
from specheads.decoding.decoder import Baseline, SpeculativeDecoder
from specheads.decoding.engine.own_cache import cache_of
from specheads.decoding.responses import Responder, row_uniforms
from specheads.errors import UserError
from specheads.evaluation.probe.prediction import agreement
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.pair.language_model import LanguageModel
from specheads.prompts.prompt import Prompt, ResponseLimits
from specheads.replay.head_scores import add_predictions, head_fingerprint
from specheads.replay.recording import Recorder, load_recording
from specheads.replay.response_tree import RecordSettings
from specheads.training.distill.draft_quality import overlaps_at
from specheads.training.distill.samples import held_out

PROMPT = [0, 1, 2]
GREEDY = Warp(temperature=0)
WARPS = {"plain": Warp(), "greedy": GREEDY, "top-k": Warp(top_k=2), "top-p": Warp(top_p=0.8)}


@pytest.fixture
def pair():
    pair = tiny_pair(4, scale=1.5)
    for lm in (pair.draft_lm, pair.target_lm):
        cache_of(lm)  # a check that engines make once, of no response
    return pair


@pytest.fixture
def broken(pair, monkeypatch):
    """A function that breaks one entry of the logits of the n-th call of one of the pair's models.

    Returns whether it came.
    """
    plain = LanguageModel.kept_logits
    came = []

    def give(role, call, value):
        lm = getattr(pair, f"{role}_lm")
        calls = itertools.count()

        def kept_logits(self, hidden):
            computed = plain(self, hidden)
            if self.model is lm.model and computed.numel() and next(calls) == call:
                computed = computed.clone()
                computed[..., 1] = value
                came.append(True)
            return computed

        monkeypatch.setattr(LanguageModel, "kept_logits", kept_logits)
        return came

    return give


def decode(warp, drafts=None, verify=None):
    def run(pair, folder):
        rule = stopping.FixedLength(2)
        SpeculativeDecoder(pair, drafts, rule, verify, warp, "eager").generate(PROMPT, 8, 1)

    return run


def decode_batch(pair, folder):
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(2), engine="eager")
    decoder.generate_batch([PROMPT, PROMPT[:2]], max_batch=2, max_new_tokens=6)


def respond(pair, folder):
    responder = Responder(pair, [len(PROMPT)], ResponseLimits(6), engine="eager")
    (made,) = responder.respond([PROMPT], np.stack([row_uniforms(0, "ab", 6)[0]]), Warp())
    if made.failure is not None:  # a row that is left out and named
        raise UserError(made.failure)


def record(pair, folder):
    prompts = [(Prompt(f"{number:04x}", "test", ""), [0, 1, number]) for number in range(2)]
    recorder = Recorder(pair, Warp(), ResponseLimits(5), RecordSettings(2, 4), 0, folder)
    return recorder.record([prompts])[0]


def label(pair, folder):
    (made,) = label_responses(pair, [PROMPT], [[1, 2, 3]], np.full((1, 2, 3), 0.5), Warp())
    if isinstance(made, str):  # a row that is left out and named
        raise UserError(made)


RUNS = {f"decoding, {name}": decode(warp) for name, warp in WARPS.items()} | {
    "decoding by block verification": decode(Warp(), verify=verification.BlockVerification()),
    "decoding of a tree": decode(GREEDY, papers.Tree(), papers.TreeMatch()),
    "decoding of a beam": decode(GREEDY, papers.Beam(3), papers.JointVerification()),
    "decoding of several drafts": decode(Warp(), papers.Multi(2), papers.MultiRound()),
    "the target alone": lambda pair, folder: Baseline(pair, Warp(), "eager").generate(PROMPT, 6),
    "a batch": decode_batch,
    "responses": respond,
    "labels": label,
    "a recording": record,
}


def said(run, pair, folder):
    """The message of a run, None if it came to its end."""
    try:
        run(pair, folder)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("name", RUNS)
def test_a_number_that_is_none_is_told_at_any_step(name, role, value, pair, broken, tmp_path):
    seen = 0
    for call in range(40):
        came = broken(role, call, value)
        before = len(came)
        if role == "draft" and name in ("the target alone", "responses"):
            RUNS[name](pair, tmp_path / str(call))
            assert not came
            return
        told = said(RUNS[name], pair, tmp_path / str(call))
        assert (told is None) == (len(came) == before), f"call {call} of the {role}"
        if told is None:
            break
        assert f"tiny-{role} produced NaN" in told
        assert name in ("labels", "a recording") or re.search(
            r"after \d+ tokens of the response", told
        )
        assert not list((tmp_path / str(call)).rglob("*.parquet"))
        seen += 1
    assert seen


@pytest.mark.parametrize("role", ["draft", "target"])
def test_predictions_and_measurements_are_refused(role, pair, broken, tmp_path, monkeypatch):
    folder = record(pair, tmp_path)
    recording = load_recording(folder)
    head = AcceptanceHead(HeadConfig(hidden_size=16, depth=0, inputs=("hidden", "second_prob")))
    samples = held_out([np.array(PROMPT)], [np.array([1, 2, 3])])
    runs = [
        lambda: add_predictions(
            folder, pair, {head_fingerprint(head): head.double()}, ground_truth=True
        ),
        lambda: agreement(pair, recording, Warp()),
        lambda: overlaps_at(pair, samples, Warp(), 2),
    ]
    for run in runs:
        with monkeypatch.context():
            came = broken(role, 0, torch.nan)
            before = len(came)
            with pytest.raises(UserError, match="produced NaN"):
                run()
            assert len(came) > before
    kept = [path.name for path in folder.glob("predictions/*/*.parquet")]
    # With the target broken, the head's predictions are right.
    assert kept == ([] if role == "draft" else ["000000-8.parquet"])
