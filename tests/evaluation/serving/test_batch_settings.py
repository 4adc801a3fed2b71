"""Settings of batches, chosen and fitted on a recording of dev prompts."""

import pytest
import torch
from fakes import tiny_pair

from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp, stopping
from specheads.decoding.batch.observation import ACCEPTANCE, OVERLAP
from specheads.decoding.load.costs import LoadCosts, SecondsTable
from specheads.decoding.load.load_aware import LoadAware, LoadBound
from specheads.evaluation.candidate import LOAD_AWARE
from specheads.evaluation.policies import PolicyChoice
from specheads.evaluation.serving.batch_settings import best_fixed, by_load, load_aware, longest_draft, predictions
from specheads.evaluation.serving.batch_sweep import BatchSetting
from specheads.prompts.encoding import ResponseLimits
from specheads.prompts.prompt import Prompt
from specheads.replay.head_scores import add_predictions, head_fingerprint, predictor_names
from specheads.replay.recording import load_recording, make_recording
from specheads.replay.response_tree import RecordSettings

COSTS = LoadCosts(SecondsTable((1, 64), (0.01, 0.02)), SecondsTable((1, 8, 64), (1.0, 1.0, 20.0)))
PAIR = tiny_pair(7, scale=2.0, same=True)


def head_of(predicts="next_token", **values):
    torch.manual_seed(0)
    return AcceptanceHead(HeadConfig(16, 1, predicts, **values)).double().requires_grad_(False)


HEADS = {
    "late": head_of("input_token"),
    "of rounds": head_of(inputs=("hidden", "index")),
    "good": head_of(overlap=True),
    "other": head_of(inputs=("hidden",)),
}


@pytest.fixture(scope="module")
def dev(tmp_path_factory):
    prompts = [(Prompt(str(number), "dev", "a"), [number, 1]) for number in range(6)]
    settings = RecordSettings(num_samples=2, max_tokens=8)
    folder = make_recording(PAIR, prompts, Warp(), ResponseLimits(12), settings, 0, tmp_path_factory.mktemp("recording"))
    named = {head_fingerprint(head): head for head in HEADS.values()}
    add_predictions(folder, PAIR, named, False)
    return load_recording(folder, predictor_names(named))


def test_more_rows_have_shorter_drafts(dev):
    """Beyond eight tokens each costs a third of a step; the draft is the target, so that one row drafts as much as it may."""
    settings = [best_fixed(dev, COSTS, (1, 3, 6), size) for size in (1, 8)]
    assert [setting.name for setting in settings] == ["fixed K=6", "fixed K=1"]
    assert settings[0].rule.max_tokens == 6 and settings[0].policy is None


def test_the_policy_asks_the_first_head_that_it_can_ask(dev, caplog):
    caplog.set_level("INFO")
    setting = load_aware(predictions(dev, HEADS), COSTS)
    assert (setting.name, setting.family, setting.asked) == ("load-aware, good", LOAD_AWARE, HEADS["good"])
    assert {ACCEPTANCE, OVERLAP} <= setting.policy.needs and setting.lossless
    assert "does not ask head late: it predicts a token only after" in caplog.text
    assert "does not ask head of rounds: the head reads index" in caplog.text
    without = load_aware(predictions(dev, {"other": HEADS["other"]}), COSTS)
    assert without.name == "load-aware, head"
    assert ACCEPTANCE in without.policy.needs and OVERLAP not in without.policy.needs


@pytest.mark.parametrize("names", [["good"], ["late"], []], ids=["head", "no head to ask", "no head"])
def test_the_policy_decodes(dev, names):
    setting = load_aware(predictions(dev, {name: HEADS[name] for name in names}), COSTS)
    assert setting.name == ("load-aware, head" if names == ["good"] else LOAD_AWARE)
    decoder = SpeculativeDecoder(PAIR, engine="eager")
    done = dict(decoder.generate_batch([[1], [2, 3], [4]], 2, 10, policy=setting.policy, head=setting.asked))
    assert sum(made.stats.num_accepted for made in done.values()) > 0


def test_a_bound_keeps_the_rule_and_asks_the_same_predictions(dev):
    policies = {"load_bound": PolicyChoice(LoadBound), "load_aware": PolicyChoice(LoadAware, {"max_tokens": 3})}
    rules = [BatchSetting("fixed K=4", "fixed_length", stopping.FixedLength(4))]
    rules.append(BatchSetting("head 0.5", "head_threshold", stopping.HeadThreshold(HEADS["late"], 0.5, max_tokens=6)))
    predicted = predictions(dev, {"good": HEADS["good"]}, longest_draft(policies))
    settings = by_load(policies, rules, predicted, COSTS)
    assert [setting.name for setting in settings] == ["fixed K=4, load bound", "head 0.5, load bound", "load-aware, head"]
    assert [setting.policy.max_tokens for setting in settings] == [4, 6, 3]
    assert [setting.rule for setting in settings] == [rules[0].rule, rules[1].rule, None]
    assert longest_draft(policies) == 8 and longest_draft({"load_aware": policies["load_aware"]}) == 3
    for setting in settings[:2]:
        decoder = SpeculativeDecoder(PAIR, stopping=setting.rule, engine="eager")
        done = dict(decoder.generate_batch([[1], [2, 3], [4]], 3, 10, policy=setting.policy, head=setting.asked))
        assert sum(made.stats.num_accepted for made in done.values()) > 0
