"""The measured costs of rules: pooled by kind, separate for each head, and predicted for prompts
that were not timed.
"""

import numpy as np
import pytest

from specheads.decoding.records import DecodeStats
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.stopping import Confidence, DraftProduct, FixedLength
from specheads.evaluation.candidates import TARGET_ALONE, Candidate, CostTable
from specheads.evaluation.report import MEASURED
from specheads.evaluation.sweep import Measured, with_measured

STEP = 0.001
PASS = 0.004
NUM_PROMPTS = 8
SIZES = {"small": 0.01, "middle": 0.02, "large": 0.05}
HEAD_SECONDS = {"small": 0.0001, "large": 0.0005}  # seconds that a head adds to a step


def decoded(name, rule, family, more=0.0, head=None, learning=0.0):
    """Rounds of 1 to 6 drafted tokens on every prompt.

    `more` seconds for each draft step, `learning` for each round.
    """
    prompts = []
    for prompt in range(NUM_PROMPTS):
        lengths = (
            [0] * 10 if rule is None else np.random.default_rng(prompt).integers(1, 7, 30).tolist()
        )
        prompts.append(
            [[1, n, n, (STEP + more) * n, PASS + 0.0001 * n + learning] for n in lengths]
        )
    stats = [
        DecodeStats(len(rows), 0, 0, 0, len(rows), sum(r[2] for r in rows), 1.0, 0.0)
        for rows in prompts
    ]
    setting = TARGET_ALONE if rule is None else Candidate(family, name, rule, rule, head=head)
    return Measured(setting, stats, prompts)


@pytest.fixture(scope="module")
def table():
    measured = [
        decoded("target alone", None, "target"),
        decoded("fixed_length(num_tokens=4)", FixedLength(4), "fixed_length"),
        decoded("product 0.5", DraftProduct(0.5), "draft_product", 0.00005, learning=0.0002),
        *(
            decoded(f"head {name}", Confidence(), "head_threshold", seconds, name)
            for name, seconds in HEAD_SECONDS.items()
        ),
    ]
    return with_measured(CostTable({"10": StepCosts.at_ratio(10)}, SIZES), measured, SIZES)


def rule(kind, head=None):
    return Candidate("family", "name", kind, kind, head=head)


def test_the_timed_costs_of_a_rule_hold_for_all_its_values(table):
    assert table.of(rule(DraftProduct(0.9)), MEASURED).draft_seconds == pytest.approx(
        STEP + 0.00005
    )
    assert table.of(rule(FixedLength(7)), MEASURED).draft_seconds == pytest.approx(STEP)
    assert table.alone == pytest.approx(1 / PASS)


def test_each_head_has_the_costs_of_its_rounds(table):
    for head, seconds in HEAD_SECONDS.items():
        assert table.of(rule(Confidence(), head), MEASURED).draft_seconds == pytest.approx(
            STEP + seconds
        )
        assert table.head_share(rule(Confidence(), head), MEASURED) == pytest.approx(seconds / STEP)
        assert table.head_share(rule(Confidence(), head), "10") == pytest.approx(SIZES[head])


def test_a_head_that_was_not_decoded_has_the_costs_of_heads_of_similar_sizes(table):
    """A quarter of the way from the small to the large head by weights, so a quarter by seconds:
    launches cost something, too.
    """
    assert table.measured_heads["middle"] == pytest.approx(0.0001 + 0.25 * 0.0004)
    assert table.of(rule(DraftProduct(0.5), "middle"), MEASURED).draft_seconds == pytest.approx(
        STEP + 0.0002
    )


def test_rules_that_were_not_timed_have_the_costs_of_timed_rules(table):
    """Otherwise each would look faster than those that were decoded, until it is decoded itself."""
    costs = table.of(rule(Confidence()), MEASURED)
    assert costs.draft_seconds == pytest.approx(STEP + 0.00005)
    assert costs.round_seconds - table.costs[MEASURED].round_seconds == pytest.approx(0.0002)
    assert table.of(rule(DraftProduct(0.5), "large"), MEASURED).draft_seconds == pytest.approx(
        STEP + 0.0005
    )
    assert table.of(rule(Confidence()), "10") == table.costs["10"]


def test_prompts_are_predicted_from_the_rounds_of_others(table):
    costs = table.for_prompts(rule(FixedLength(4)), NUM_PROMPTS)
    assert (
        costs[0] == costs[2] == table.halves[0].costs[MEASURED]
        and costs[1] == costs[3] == table.halves[1].costs[MEASURED]
    )
    assert table.halves[0].fit.num_rounds + table.halves[1].fit.num_rounds == table.fit.num_rounds
