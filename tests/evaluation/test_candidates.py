"""Rules from configs, whose open parameters are fitted on a small recording."""

from dataclasses import replace

import pytest
import torch
from random_recording import random_recording

from specheads import AcceptanceHead, HeadConfig, UserError, stopping
from specheads.commands.compose import command_config
from specheads.commands.evaluate import rule_choices
from specheads.decoding.step_costs import StepCosts
from specheads.evaluation.candidates import FIXED, Candidate, CostTable, RuleChoice, Tuning, candidates, check_rules
from specheads.pair.config import config_folder
from specheads.replay.head_scores import head_fingerprint
from specheads.replay.recording import GROUND_TRUTH
from specheads.replay.replay import recorded_head, replay

COSTS = {"measured": StepCosts(0.001, 0.004, 0.0002), "10": StepCosts.at_ratio(10)}
SHARE = 0.25  # of a draft step, for every head


@pytest.fixture(scope="module")
def heads():
    torch.manual_seed(0)
    return {
        predicts: AcceptanceHead(HeadConfig(32, 1, predicts, width=8)).eval().requires_grad_(False)
        for predicts in ("next_token", "input_token")
    }


@pytest.fixture(scope="module")
def tuning(heads):
    made = random_recording(num_prompts=12, num_samples=3, max_tokens=20, longest=30)
    generator, chance = torch.Generator().manual_seed(7), 2 * made.features["max_prob"] - 0.4
    for head in heads.values():
        made.features[head_fingerprint(head)] = 3 * chance + 0.5 * torch.randn(len(chance), generator=generator)
    made.features[GROUND_TRUTH] = chance.clamp(0.01, 0.99)
    return Tuning(made, CostTable(COSTS, dict.fromkeys(heads, SHARE)))


def all_rules():
    cfg = command_config("evaluate", ["model=nano"])
    return rule_choices(cfg.stopping)


def test_every_rule_of_the_config_is_replayed_with_every_value(tuning, heads):
    rules = all_rules()
    files = {path.stem for path in (config_folder() / "stopping").glob("*.yaml")}
    files.remove("all")
    assert set(rules) == files and max(rule.max_tokens for choice in rules.values() for rule in choice.samples()) == 20
    tried = candidates(rules, heads, tuning)
    families = {candidate.family for candidate in tried}
    for name in files:
        assert name in families or {f"{name} next_token", f"{name} input_token"} <= families
    assert "ceiling" in families and "head_threshold input_token auto" in families
    assert [candidate.rule.num_tokens for candidate in tried if candidate.family == FIXED] == [1, 2, 3, 4, 5, 6, 8, 10, 12, 14]
    assert len({candidate.name for candidate in tried}) == len(tried)
    assert all(candidate.live is None for candidate in tried if candidate.family == "ceiling")
    for candidate, rounds in zip(tried, replay(tuning.recording, [each.rule for each in tried]), strict=True):
        counts = rounds.per_prompt(12)
        assert (counts.tokens == 3 * tuning.recording.lengths.numpy()).all(), candidate.name
    for candidate in tried:
        if candidate.live is not None and candidate.head is not None:
            assert candidate.live.head is heads[candidate.head] and candidate.rule.head == recorded_head(heads[candidate.head])


def test_rules_that_depend_on_costs_come_once_per_ratio(tuning, heads):
    tried = [candidate for candidate in candidates(all_rules(), heads, tuning) if candidate.ratio is not None]
    assert {candidate.family.split()[0] for candidate in tried} == {
        "head_threshold",
        "online_head",
    }
    for family in {candidate.family for candidate in tried}:
        assert {candidate.ratio for candidate in tried if candidate.family == family} == set(COSTS)


def test_a_logistic_is_fitted_to_acceptance(tuning):
    """Its mean prediction is the acceptance rate, and no other weights fit the recorded outcomes better."""
    rules = {"logistic": RuleChoice(stopping.Logistic, {"weights": {"logit_max_prob": None, "bias": None}, "threshold": [0.5]})}
    (candidate, *_) = candidates(rules, {}, tuning)
    node, _, accepted, _ = tuning.recording.labels()
    inputs = tuning.recording.features["max_prob"][node].double().logit(1e-6)

    def loss(slope, bias):
        return torch.nn.functional.binary_cross_entropy_with_logits(slope * inputs + bias, accepted.double())

    slope, bias = candidate.rule.weights["logit_max_prob"], candidate.rule.weights["bias"]
    assert torch.sigmoid(slope * inputs + bias).mean() == pytest.approx(accepted.double().mean().item(), abs=1e-6)
    assert all(loss(slope + a, bias + b) > loss(slope, bias) for a, b in [(0.05, 0), (-0.05, 0), (0, 0.05), (0, -0.05)])
    assert candidate.live.weights == candidate.rule.weights


@pytest.mark.parametrize("predicts", ["next_token", "input_token"])
@pytest.mark.parametrize("ratio", COSTS)
def test_the_automatic_threshold_is_a_fixed_point(tuning, heads, predicts, ratio):
    head, costs = recorded_head(heads[predicts]), COSTS[ratio]
    threshold = tuning.auto_threshold(head, 20, costs)
    (rounds,) = replay(tuning.recording, [stopping.HeadThreshold(head, threshold)])
    counts = rounds.per_prompt(12)
    seconds = costs.seconds(counts.drafted, counts.rounds).sum()
    achieved = counts.tokens.sum() / seconds * (costs.draft_seconds + costs.verified_seconds)
    worth = tuning.mean_acceptance ** (1 if predicts == "next_token" else 2)
    assert threshold == pytest.approx(max(0.02, 1 - achieved / worth), abs=0.05)


@pytest.mark.parametrize("ratio", COSTS)
def test_fits_for_a_head_count_its_cost(tuning, heads, ratio):
    (candidate,) = [
        c for c in candidates(all_rules(), heads, tuning) if c.family == "head_threshold next_token auto" and c.ratio == ratio
    ]
    dearer = replace(COSTS[ratio], draft_seconds=(1 + SHARE) * COSTS[ratio].draft_seconds)
    expected = tuning.auto_threshold(recorded_head(heads["next_token"]), 20, dearer)
    free = tuning.auto_threshold(recorded_head(heads["next_token"]), 20, COSTS[ratio])
    assert candidate.rule.threshold == expected < free


def test_without_a_recording_only_rules_without_open_parameters_can_be_tried(heads):
    fixed = {"fixed_length": RuleChoice(stopping.FixedLength, {"num_tokens": 4})}
    (candidate,) = candidates(fixed, {}, None)
    assert (candidate.name, candidate.family, candidate.ratio) == ("fixed_length(num_tokens=4)", FIXED, None)
    head = {"head_threshold": RuleChoice(stopping.HeadThreshold, {"threshold": [0.3, 0.7]})}
    tried = candidates(head, {"mine": heads["next_token"]}, None)
    assert [(candidate.name, candidate.family, *candidate.parameters.values()) for candidate in tried] == [
        ("head_threshold(threshold=0.3)", "head_threshold", 0.3),
        ("head_threshold(threshold=0.7)", "head_threshold", 0.7),
    ]
    assert isinstance(tried[0], Candidate)
    with pytest.raises(UserError, match="weights"):
        candidates({"logistic": all_rules()["logistic"]}, {}, None)
    with pytest.raises(UserError, match="threshold"):
        candidates({"head_threshold": RuleChoice(stopping.HeadThreshold, {"threshold": ["auto"]})}, heads, None)


class EveryOther(stopping.FixedLength):
    """A rule that no file but this one knows: its cost ratio is fitted."""

    fitted_to_costs = frozenset({"ratio"})

    def __init__(self, ratio, max_tokens=6):
        super().__init__(max_tokens)
        self.ratio = ratio

    @classmethod
    def open_parameters(cls, arguments):
        return frozenset({"ratio"} if arguments["ratio"] is None else ())

    @classmethod
    def fit(cls, arguments, fitting, head, costs):
        return {**arguments, "ratio": costs.target_seconds / costs.draft_seconds}


def test_a_rule_outside_the_package_is_fitted_named_and_checked_like_the_others(tuning):
    rules = {"mine": RuleChoice(EveryOther, {"ratio": None, "max_tokens": [4, 6]})}
    check_rules(rules)
    assert max(rule.max_tokens for rule in rules["mine"].samples()) == 6
    tried = [candidate for candidate in candidates(rules, {}, tuning) if candidate.family == "mine"]
    assert [(candidate.name, candidate.rule.ratio) for candidate in tried] == [
        (f"mine(max_tokens={length})", costs.target_seconds / costs.draft_seconds)
        for length in (4, 6)
        for costs in COSTS.values()
    ]
    with pytest.raises(UserError, match="EveryOther leaves ratio to be fitted"):
        candidates(rules, {}, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": []}, r"stopping.mine.num_tokens=\[\] must name at least one value"),
        ({"num_tokens": [2, 0]}, "stopping.mine.num_tokens=0 must be a positive integer"),
        ({"num_tokens": "auto"}, "stopping.mine.num_tokens=auto must be a positive integer"),
        ({"length": 2}, "stopping.mine has arguments that its class does not take"),
    ],
)
def test_values_that_a_rule_refuses_are_named_as_on_the_command_line(arguments, message):
    with pytest.raises(UserError, match=message):
        check_rules({"mine": RuleChoice(stopping.FixedLength, arguments)})
