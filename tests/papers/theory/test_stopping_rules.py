"""Rules that stop drafts against the solved policy: simulation, identities, and the theorem's
condition.
"""

import pytest
import torch

from benchmarks.papers.stopping import (
    CHAINS,
    KEPT,
    _value_of_going_on,
    automatic_threshold,
    best_fixed,
    best_threshold,
    fewest_calls,
    lengths_at,
    lengths_of,
    optimal_stopping,
    speed,
    theorem_delta,
    theorem_threshold,
)
from specheads.decoding.step_costs import StepCosts


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def error_of(survival, lengths, value, costs):
    """Return the standard error of a speed over drafts."""
    before_end = torch.arange(survival.shape[1]) < lengths[:, None]
    tokens = 1 + (survival * before_end).sum(dim=1)
    seconds = costs.target_seconds + costs.draft_seconds * lengths
    return (tokens - value * seconds).std().item() / seconds.mean().item() / len(lengths) ** 0.5


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("ratio", [4, 12])
def test_simulated_drafts_are_as_fast_as_the_solved_policy_says(name, ratio):
    """Wrong in one of a million: 4.9 standard errors, and 0.3 % for the grid of the solution."""
    chain = CHAINS[name]
    costs = StepCosts.at_ratio(ratio)
    policy = optimal_stopping(chain, costs, 20)
    drafts = chain.drafts(20_000, 20, generator())
    lengths = lengths_of(drafts, chain, policy)
    survival = drafts.cumprod(dim=1)
    best = speed(survival, lengths, costs)
    margin = 4.9 * error_of(survival, lengths, best, costs) + 3e-3 * policy.throughput
    assert abs(best - policy.throughput) < margin
    thresholds = best_threshold(survival, costs), automatic_threshold(drafts, costs)
    others = [speed(survival, lengths_at(survival, each), costs) for each in thresholds]
    assert max(*others, best_fixed(survival, costs)[0]) <= best + margin


def test_lengths_end_with_the_token_that_crosses_the_threshold():
    drafts = torch.tensor([[0.9, 0.5, 0.9], [0.9, 0.9, 0.9], [0.1, 0.9, 0.9]], dtype=torch.float64)
    survival = drafts.cumprod(dim=1)
    assert lengths_at(survival, 0.5).tolist() == [2, 3, 1]
    assert speed(survival, torch.tensor([1, 1, 1]), StepCosts.at_ratio(2)) == pytest.approx(
        (3 + 1.9) / 4.5
    )


@pytest.mark.parametrize("name", CHAINS)
def test_the_value_of_going_on_is_nothing_where_the_policy_is_indifferent(name):
    """At the least survival, the tokens that are still accepted are worth exactly the time that
    drafting takes.
    """
    chain = CHAINS[name]
    costs = StepCosts.at_ratio(10)
    policy = optimal_stopping(chain, costs, 12)
    accepted, drafted = _value_of_going_on(chain, policy)
    gain = KEPT[:, None] * accepted - policy.throughput * costs.draft_seconds * drafted
    inside = policy.least_survival[:-1].clamp(KEPT[1], 1.0)
    place = (KEPT - inside[..., None]).abs().argmin(dim=-1)
    at_least = gain.gather(1, place[:, None]).squeeze(1)
    reached = (policy.least_survival[:-1] > KEPT[1]) & (policy.least_survival[:-1] < 1)
    assert reached.any() and (at_least[reached].abs() < 0.05).all()


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("ratio", [5, 20])
def test_the_best_policy_stops_wherever_the_theorem_says_so(name, ratio):
    chain = CHAINS[name]
    costs = StepCosts.at_ratio(ratio)
    policy = optimal_stopping(chain, costs, 20)
    delta = theorem_delta(chain, policy, costs)
    assert delta >= 0
    assert (policy.least_survival[:-1] >= 1 - theorem_threshold(delta, costs) - 1e-9).all()
    assert (
        theorem_threshold(delta, costs)
        >= theorem_threshold(0.0, costs)
        == pytest.approx(1 - costs.draft_seconds)
    )


def test_the_fewest_calls_are_those_of_the_lemma():
    assert fewest_calls([False] * 5) == (1, 0)
    assert fewest_calls([False, True, False, True, False]) == (3, 0)
    assert fewest_calls([False, False, True]) == (1, 0)  # the call's next token ends the text
