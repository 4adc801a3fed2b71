"""What is stored in a head's folder: the fastest setting with it of those that were tried on dev
prompts.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from specheads import AcceptanceHead, HeadConfig
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.evaluation.candidates import TARGET_ALONE, Candidate, fixed_length
from specheads.evaluation.decode import under_block
from specheads.evaluation.replayed_sets import Outcome, recommendations, setting_to_use
from specheads.evaluation.report import MEASURED
from specheads.evaluation.sweep import Measured

HEAD, OTHER = (AcceptanceHead(HeadConfig(8, 0)) for _ in range(2))
RULES = [HeadThreshold(HEAD, 0.4, max_tokens=8), HeadThreshold(HEAD, 0.53)]
SETTINGS = [
    Candidate("head_threshold", "head 0.4", RULES[0], RULES[0], head="mine"),
    Candidate("head_threshold auto", "head 0.53 (auto)", RULES[1], RULES[1], head="mine"),
    fixed_length(2),
]
BLOCK = " verification=block"
BEST = {MEASURED: {"fixed_length": 2, "head_threshold other": 1, "head_threshold mine": 0}}


@pytest.fixture
def stored(tmp_path):
    """What is stored of the head `mine`, and of one that was not decoded, after a trial with these
    speeds.
    """
    folders = {name: tmp_path / name for name in ("mine", "other")}
    for folder in folders.values():
        folder.mkdir()
    setup = SimpleNamespace(
        located_heads={name: SimpleNamespace(where=str(folder)) for name, folder in folders.items()}
    )
    measured = [Measured(setting) for setting in [TARGET_ALONE, *SETTINGS, *under_block(SETTINGS)]]
    rules = [
        SimpleNamespace(
            name="head 0.53 (auto)", speedup={MEASURED: SimpleNamespace(value=1.7), "5": None}
        )
    ]
    rules.append(SimpleNamespace(name="other 0.3", speedup={MEASURED: SimpleNamespace(value=1.3)}))
    report = SimpleNamespace(data_sets=[None, SimpleNamespace(rules=rules)])
    rules_tried = {
        "mine": (HeadThreshold(HEAD, 0.4), "mine"),
        "other": (HeadThreshold(OTHER, 0.3), "other"),
    }
    rules_tried["fixed"] = (FixedLength(2), None)
    candidates = [
        Candidate(name, name, rule, rule, head=head) for name, (rule, head) in rules_tried.items()
    ]

    def run(tried, fixed=1.2, predicted=1.3, dev=1.3, best=BEST, hub=()):
        rules[1].speedup[MEASURED].value = predicted
        for name, folder in folders.items():
            setup.located_heads[name].where = "user/name" if name in hub else str(folder)
        spread = 1 + 0.02 * np.sin(np.arange(101))  # of resamples, which the settings share
        speeds = {name: speed * spread for name, speed in tried.items()}
        outcome = Outcome(
            candidates,
            None,
            best=best,
            speeds={MEASURED: [9.0, dev, fixed]},
            measured=measured,
            tried=speeds,
        )
        found = recommendations(setup, outcome, report)
        return found.get(folders["mine"]), found.get(folders["other"])

    return run


SPEEDS = {
    "target alone": 100.0,
    "head 0.4": 120.0,
    f"head 0.4{BLOCK}": 130.0,
    "head 0.53 (auto)": 140.0,
    "fixed_length(num_tokens=2)": 125.0,
}


def test_the_fastest_rule_of_the_head_is_stored_with_the_faster_verification(stored):
    values, _ = stored(SPEEDS | {f"head 0.53 (auto){BLOCK}": 150.0})
    assert values == {
        "threshold": 0.53,
        "min_tokens": 1,
        "max_tokens": 20,
        "verification": "block",
        "measured_speedup": pytest.approx(1.5),
        "predicted_speedup": 1.7,
    }
    values, _ = stored(SPEEDS | {f"head 0.53 (auto){BLOCK}": 110.0})
    assert (values["verification"], values["measured_speedup"]) == ("token", pytest.approx(1.4))
    values, _ = stored(SPEEDS | {f"head 0.4{BLOCK}": 160.0})
    assert (values["threshold"], values["max_tokens"], values["verification"]) == (0.4, 8, "block")
    assert "predicted_speedup" not in values  # that rule is not in the report


@pytest.mark.parametrize(
    "faster", ["target alone", "fixed_length(num_tokens=2)", f"fixed_length(num_tokens=2){BLOCK}"]
)
def test_a_head_that_was_slower_than_another_setting_recommends_nothing(stored, faster):
    assert stored(SPEEDS | {faster: 141.0})[0] is None


def test_a_setting_that_is_faster_by_chance_changes_nothing(stored):
    """Of the resamples of the prompts, some have it slower."""
    assert (
        stored(SPEEDS | {"fixed_length(num_tokens=2)": 140.5 + np.cos(np.arange(101))})[0][
            "threshold"
        ]
        == 0.53
    )


def test_a_head_that_was_not_decoded_recommends_what_replay_predicts(stored):
    assert stored(SPEEDS)[1] == {
        "threshold": 0.3,
        "min_tokens": 1,
        "max_tokens": 20,
        "predicted_speedup": 1.3,
    }
    assert stored(SPEEDS, fixed=1.4)[1] is None and stored(SPEEDS, fixed=1.3)[1] is None
    assert stored(SPEEDS, fixed=0.8, dev=0.9)[1] is None  # the target alone is faster


def test_the_reported_prompts_decide_nothing(stored):
    """A head that was slower there is stored with that speed: which heads are stored is decided on
    dev prompts.
    """
    assert stored(SPEEDS, predicted=0.9)[1]["predicted_speedup"] == 0.9
    assert stored(SPEEDS, fixed=0.8, dev=0.9, predicted=1.3)[1] is None


@pytest.mark.parametrize(
    ("gain", "name"),
    [(1.2, "fixed_length(num_tokens=2)"), (1.01, "target alone"), (0.9, "target alone")],
)
def test_a_setting_that_is_not_clearly_faster_leaves_the_target_alone(gain, name):
    alone = 100 * (1 + 0.02 * np.sin(np.arange(101)))
    tried = {
        "target alone": alone,
        "fixed_length(num_tokens=2)": gain * alone * (1 + 0.05 * np.sin(2 * np.arange(101))),
    }
    assert setting_to_use(tried, set()) == name


@pytest.mark.parametrize(("gain", "name"), [(1.1, "head"), (1.01, "rule"), (0.9, "rule")])
def test_a_head_is_used_only_where_it_is_clearly_faster_than_what_needs_none(gain, name):
    rule = 140 * (1 + 0.02 * np.sin(np.arange(101)))
    alone = np.full(101, 100.0)
    tried = {
        "target alone": alone,
        "rule": rule,
        "head": gain * rule * (1 + 0.05 * np.sin(2 * np.arange(101))),
    }
    assert setting_to_use(tried, {"head"}) == name


@pytest.mark.parametrize(("count", "name"), [(1, "head 0"), (30, "rule")])
def test_the_best_of_many_heads_must_be_faster_than_chance_makes_the_best_of_so_many(count, name):
    """Two standard errors are clear for one head, and nothing for the best of thirty."""
    rng = np.random.default_rng(0)
    tried = {"target alone": np.ones(2001), "rule": np.full(2001, 1.5)}
    for number in range(count):
        gain = 1.02 if number == 0 else 1.0
        tried[f"head {number}"] = (
            1.5 * gain * (1 + 0.01 * np.concatenate([[0], rng.standard_normal(2000)]))
        )
    assert setting_to_use(tried, tried.keys() - {"target alone", "rule"}) == name


def test_the_estimate_chooses_and_no_resample():
    tried = {
        "target alone": [1, 1, 1, 1],
        "best": [1.5, 1.49, 1.5, 1.51],
        "lucky": [1.4, 9, 1.3, 1.5],
        "head": [1.6, 1.59, 1.6, 1.61],
    }
    speeds = {name: np.array(values) for name, values in tried.items()}
    assert setting_to_use({name: speeds[name] for name in list(tried)[:3]}, set()) == "best"
    assert (
        setting_to_use(speeds, {"head"}) == "head"
    )  # compared with the best of the others, not with a lucky one
    assert setting_to_use(speeds | {"head": np.array([1.505, 1.4, 1.6, 1.5])}, {"head"}) == "best"


def test_what_is_stored_of_a_trial_is_its_estimate(stored):
    lucky = 30 * (np.arange(101) == 1)  # in one resample
    values, _ = stored(SPEEDS | {"head 0.4": 120 + lucky, "target alone": 100 + lucky})
    assert values["threshold"] == 0.53 and values["measured_speedup"] == pytest.approx(1.4)
    assert (
        stored(SPEEDS | {"fixed_length(num_tokens=2)": 140.0})[0] == stored(SPEEDS)[0]
    )  # as fast is not faster


def test_only_folders_get_a_recommendation_and_only_where_something_was_replayed(stored):
    assert stored(SPEEDS, best={}) == (None, None)
    assert stored(SPEEDS, hub=["mine"]) == (None, stored(SPEEDS)[1]) != (None, None)
