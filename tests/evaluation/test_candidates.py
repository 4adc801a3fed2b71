"""Rules from configs, whose open parameters are fitted on a small recording."""

from dataclasses import replace

import pytest
import torch
from random_recording import random_recording

from specheads import AcceptanceHead, HeadConfig, UserError, stopping
from specheads.commands.compose import command_config
from specheads.commands.evaluate import rule_choices
from specheads.decoding.step_costs import StepCosts
from specheads.evaluation.candidates import (
    FIXED,
    Candidate,
    CostTable,
    RuleChoice,
    Tuning,
    candidates,
    check_rules,
    typed,
)
from specheads.heads.metrics import fit_logistic
from specheads.pair.config import config_folder
from specheads.replay.head_scores import head_fingerprint
from specheads.replay.recording import GROUND_TRUTH
from specheads.replay.replay import RecordedHead, recorded_head, replay

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
    generator = torch.Generator().manual_seed(7)
    chance = 2 * made.features["max_prob"] - 0.4
    for head in heads.values():
        made.features[head_fingerprint(head)] = 3 * chance + 0.5 * torch.randn(
            len(chance), generator=generator
        )
    made.features[GROUND_TRUTH] = chance.clamp(0.01, 0.99)
    return Tuning(made, CostTable(COSTS, dict.fromkeys(heads, SHARE)))


def all_rules():
    cfg = command_config("evaluate", ["model=nano"])
    return rule_choices(cfg.stopping)


def test_every_rule_of_the_config_is_replayed_with_every_value(tuning, heads):
    rules = all_rules()
    files = {path.stem for path in (config_folder() / "stopping").glob("*.yaml")}
    files.remove("all")
    assert (
        set(rules) == files
        and max(rule.max_tokens for choice in rules.values() for rule in choice.samples()) == 20
    )
    tried = candidates(rules, heads, tuning)
    families = {candidate.family for candidate in tried}
    for name in files:
        assert name in families or {f"{name} next_token", f"{name} input_token"} <= families
    assert "ceiling" in families and "head_threshold input_token auto" in families
    assert [candidate.rule.num_tokens for candidate in tried if candidate.family == FIXED] == [
        1,
        2,
        3,
        4,
        5,
        6,
        8,
        10,
        12,
        14,
    ]
    assert len({candidate.name for candidate in tried}) == len(tried)
    assert all(candidate.live is None for candidate in tried if candidate.family == "ceiling")
    for candidate, rounds in zip(
        tried, replay(tuning.recording, [each.rule for each in tried]), strict=True
    ):
        counts = rounds.per_prompt(12)
        assert (counts.tokens == 3 * tuning.recording.lengths.numpy()).all(), candidate.name
    for candidate in tried:
        if candidate.live is not None and candidate.head is not None:
            assert candidate.live.head is heads[
                candidate.head
            ] and candidate.rule.head == recorded_head(heads[candidate.head])


def test_rules_that_depend_on_costs_come_once_per_ratio(tuning, heads):
    tried = [
        candidate
        for candidate in candidates(all_rules(), heads, tuning)
        if candidate.ratio is not None
    ]
    assert {candidate.family.split()[0] for candidate in tried} == {
        "head_threshold",
        "online_head",
    }
    for family in {candidate.family for candidate in tried}:
        assert {candidate.ratio for candidate in tried if candidate.family == family} == set(COSTS)


def test_a_logistic_is_fitted_to_acceptance(tuning):
    """Its mean prediction is the acceptance rate, and no other weights fit the recorded outcomes
    better.
    """
    rules = {
        "logistic": RuleChoice(
            stopping.Logistic,
            {"weights": {"logit_max_prob": None, "bias": None}, "threshold": [0.5]},
        )
    }
    candidate, *_ = candidates(rules, {}, tuning)
    node, _, accepted, _ = tuning.recording.labels()
    inputs = tuning.recording.features["max_prob"][node].double().logit(1e-6)

    def loss(slope, bias):
        return torch.nn.functional.binary_cross_entropy_with_logits(
            slope * inputs + bias, accepted.double()
        )

    slope = candidate.rule.weights["logit_max_prob"]
    bias = candidate.rule.weights["bias"]
    assert torch.sigmoid(slope * inputs + bias).mean() == pytest.approx(
        accepted.double().mean().item(), abs=1e-6
    )
    assert all(
        loss(slope + a, bias + b) > loss(slope, bias)
        for a, b in [(0.05, 0), (-0.05, 0), (0, 0.05), (0, -0.05)]
    )
    assert candidate.live.weights == candidate.rule.weights


@pytest.mark.parametrize("predicts", ["next_token", "input_token"])
@pytest.mark.parametrize("ratio", COSTS)
def test_the_automatic_threshold_is_a_fixed_point(tuning, heads, predicts, ratio):
    head = recorded_head(heads[predicts])
    costs = COSTS[ratio]
    threshold = tuning.auto_threshold(head, 20, costs)
    (rounds,) = replay(tuning.recording, [stopping.HeadThreshold(head, threshold)])
    counts = rounds.per_prompt(12)
    seconds = costs.seconds(counts.drafted, counts.rounds, counts.whole).sum()
    achieved = counts.tokens.sum() / seconds * (costs.draft_seconds + costs.verified_seconds)
    worth = tuning.mean_acceptance ** (1 if predicts == "next_token" else 2)
    assert threshold == pytest.approx(max(0.02, 1 - achieved / worth), abs=0.05)


@pytest.mark.parametrize("ratio", COSTS)
def test_fits_for_a_head_count_its_cost(tuning, heads, ratio):
    (candidate,) = [
        c
        for c in candidates(all_rules(), heads, tuning)
        if c.family == "head_threshold next_token auto" and c.ratio == ratio
    ]
    dearer = replace(COSTS[ratio], draft_seconds=(1 + SHARE) * COSTS[ratio].draft_seconds)
    expected = tuning.auto_threshold(recorded_head(heads["next_token"]), 20, dearer)
    free = tuning.auto_threshold(recorded_head(heads["next_token"]), 20, COSTS[ratio])
    assert candidate.rule.threshold == expected < free


def test_without_a_recording_only_rules_without_open_parameters_can_be_tried(heads):
    fixed = {"fixed_length": RuleChoice(stopping.FixedLength, {"num_tokens": 4})}
    (candidate,) = candidates(fixed, {}, None)
    assert (candidate.name, candidate.family, candidate.ratio) == (
        "fixed_length(num_tokens=4)",
        FIXED,
        None,
    )
    head = {"head_threshold": RuleChoice(stopping.HeadThreshold, {"threshold": [0.3, 0.7]})}
    tried = candidates(head, {"mine": heads["next_token"]}, None)
    assert [
        (candidate.name, candidate.family, *candidate.parameters.values()) for candidate in tried
    ] == [
        ("head_threshold(threshold=0.3)", "head_threshold", 0.3),
        ("head_threshold(threshold=0.7)", "head_threshold", 0.7),
    ]
    assert isinstance(tried[0], Candidate)
    with pytest.raises(UserError, match="weights"):
        candidates({"logistic": all_rules()["logistic"]}, {}, None)
    with pytest.raises(UserError, match="threshold"):
        candidates(
            {"head_threshold": RuleChoice(stopping.HeadThreshold, {"threshold": ["auto"]})},
            heads,
            None,
        )


class Patient(stopping.HeadThreshold):
    """A rule that no file but this one knows: it asks for the threshold of shorter drafts."""

    fitted_to_costs = frozenset({"threshold"})

    @classmethod
    def open_parameters(cls, arguments):
        return frozenset({"threshold"} if arguments["threshold"] is None else ())

    @classmethod
    def fit(cls, arguments, fitting):
        return {**arguments, "threshold": fitting.auto_threshold(4)}


def test_a_rule_outside_the_package_is_fitted_named_and_checked_like_the_others(tuning, heads):
    rules = {"mine": RuleChoice(Patient, {"threshold": None, "max_tokens": [4, 6]})}
    check_rules(rules)
    assert max(rule.max_tokens for rule in rules["mine"].samples()) == 6
    head = {"next_token": heads["next_token"]}
    tried = [each for each in candidates(rules, head, tuning) if each.family == "mine"]
    expected = []
    for costs in COSTS.values():
        with_head = costs.with_rule(SHARE * costs.draft_seconds)
        expected.append(tuning.auto_threshold(recorded_head(heads["next_token"]), 4, with_head))
    assert [each.rule.threshold for each in tried] == [*expected, *expected]
    assert [each.ratio for each in tried] == [*COSTS, *COSTS]
    with pytest.raises(UserError, match="Patient leaves threshold to be fitted"):
        candidates(rules, heads, None)


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


def test_values_are_written_as_a_command_line_takes_them():
    values = {
        "a": 0.5,
        "b": None,
        "c": True,
        "d": {"e": 1.0, "f": None},
        "g": "Auto",
        "h": 1e-7,
        "i": 20,
    }
    assert (
        typed("rule", values)
        == "rule(a=0.5, b=null, c=true, d={e: 1, f: null}, g=auto, h=1e-07, i=20)"
    )


def test_without_a_recording_automatic_values_are_left_out():
    choice = RuleChoice(stopping.HeadThreshold, {"threshold": ["auto", 0.5, 0.7], "max_tokens": 8})
    assert choice.without_auto() == RuleChoice(
        stopping.HeadThreshold, {"threshold": [0.5, 0.7], "max_tokens": 8}
    )


def test_rules_are_sampled_with_every_value():
    rules = RuleChoice(stopping.FixedLength, {"num_tokens": [3, 5, 4]}).samples()
    assert [rule.num_tokens for rule in rules] == [3, 5, 4]
    (fitted,) = RuleChoice(stopping.HeadThreshold, {"threshold": "auto", "max_tokens": 4}).samples()
    assert (fitted.threshold, fitted.max_tokens, fitted.head.config.predicts) == (
        0.5,
        4,
        "next_token",
    )
    (weighed,) = RuleChoice(
        stopping.Logistic, {"weights": {"max_prob": None, "bias": None}, "threshold": 0.5}
    ).samples()
    assert weighed.weights == {"max_prob": 0.0, "bias": 0.0}
    (mine,) = RuleChoice(Patient, {"threshold": None}).samples()
    assert mine.threshold == 0.5


def test_a_logistic_of_several_inputs_has_its_offset_last(tuning):
    weights = tuning.logistic(["max_prob", "bias", "entropy"])
    node, _, accepted, _ = tuning.recording.labels()
    features = tuning.recording.features
    inputs = torch.stack([features["max_prob"][node], features["entropy"][node]], dim=1)
    expected = fit_logistic(inputs.double(), accepted.double()).tolist()
    assert list(weights) == ["max_prob", "entropy", "bias"]
    assert [*weights.values()] == pytest.approx(expected, rel=1e-5)


def always_accepted():
    """A recording of drafts that are all accepted, whose head is sure of that."""
    made = random_recording(num_prompts=6, num_samples=1, max_tokens=20, longest=30)
    everything = torch.ones_like(made.accepted)
    features = {"head": torch.full_like(made.features["max_prob"], 30.0)}
    return replace(
        made, accepted=everything, branch_length=0 * made.branch_length, features=features
    )


@pytest.mark.parametrize(("draft_seconds", "threshold"), [(1e-9, 0.98), (100.0, 0.02)])
def test_where_drafting_always_or_never_pays_the_threshold_is_at_an_end(draft_seconds, threshold):
    costs = StepCosts(draft_seconds, 1.0)
    head = RecordedHead("head", "next_token")
    assert Tuning(always_accepted(), CostTable({})).auto_threshold(head, 7, costs) == threshold


def test_candidates_are_named_by_what_tells_them_apart(heads, tuning):
    """By the head where there are several, by values that are tried or numbers, and by the longest
    draft.
    """
    rules = {
        "mine": RuleChoice(
            stopping.HeadThreshold, {"threshold": [0.3, "auto"], "min_tokens": 2, "max_tokens": 6}
        )
    }
    tried = candidates(
        rules,
        heads,
        replace(tuning, recording=replace(tuning.recording, features=without_truth(tuning))),
    )
    assert [each.family for each in tried] == [
        f"mine {head}{auto}" for head in heads for auto in ("", " auto", " auto")
    ]
    assert [(each.ratio, each.automatic, each.head, each.rule_name) for each in tried[:3]] == [
        (None, False, "next_token", "mine"),
        ("measured", True, "next_token", "mine"),
        ("10", True, "next_token", "mine"),
    ]
    assert tried[0].name == "mine(head=next_token, threshold=0.3, max_tokens=6)" and tried[
        0
    ].parameters == {"threshold": 0.3}
    assert (
        tried[0].arguments
        == {"threshold": 0.3, "min_tokens": 2, "max_tokens": 6}
        == tried[3].arguments
    )
    assert (
        tried[0].live.min_tokens == tried[0].rule.min_tokens == 2
        and tried[0].live.head is heads["next_token"]
    )
    for each in tried[1:3]:
        fitted = each.parameters["threshold"]
        assert (
            each.name == f"mine(head=next_token, threshold={fitted:g}, max_tokens=6)"
            and each.live.threshold == fitted
        )
    alone, *_ = candidates(
        rules, {"only": heads["next_token"]}, replace(tuning, cost_table=CostTable(COSTS))
    )
    assert (alone.name, alone.family) == ("mine(threshold=0.3, max_tokens=6)", "mine")
    fixed = candidates({FIXED: RuleChoice(stopping.FixedLength, {"num_tokens": 4})}, {}, None)
    assert [(each.name, each.parameters) for each in fixed] == [
        ("fixed_length(num_tokens=4)", {"num_tokens": 4})
    ]
    weights = {"max_prob": None, "bias": None}
    learned = candidates(
        {"l": RuleChoice(stopping.Logistic, {"weights": weights, "threshold": [0.5, 0.7]})},
        {},
        tuning,
    )
    assert [each.name for each in learned[:2]] == ["l(threshold=0.5)", "l(threshold=0.7)"]


def without_truth(tuning):
    return {
        name: values for name, values in tuning.recording.features.items() if name != GROUND_TRUTH
    }


@pytest.mark.parametrize(("longest", "most"), [(4, 4), (30, 20)])
def test_the_ceiling_drafts_as_far_as_the_rules_and_the_recording(tuning, longest, most):
    tried = candidates(
        {FIXED: RuleChoice(stopping.FixedLength, {"num_tokens": [2, longest]})}, {}, tuning
    )
    bounds = [each for each in tried if each.bound]
    assert [each.name for each in bounds[:2]] == ["ceiling 0.05", "ceiling 0.1"] and len(
        bounds
    ) == 19
    assert bounds[1].parameters == {"threshold": 0.1} and (
        bounds[1].rule.threshold,
        bounds[1].rule.max_tokens,
    ) == (0.1, most)
    assert all(each.family == each.rule_name == "ceiling" and each.live is None for each in bounds)
    without = replace(tuning, recording=replace(tuning.recording, features=without_truth(tuning)))
    assert not any(
        each.bound
        for each in candidates(
            {FIXED: RuleChoice(stopping.FixedLength, {"num_tokens": 2})}, {}, without
        )
    )
