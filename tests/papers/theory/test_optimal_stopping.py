import itertools

import pytest
import torch

from benchmarks.papers.stopping import CHAINS, AcceptanceChain, optimal_stopping
from specheads.decoding.step_costs import StepCosts

chain = AcceptanceChain.of


def enumerated(chain, draft_seconds, target_seconds, max_tokens):
    """Return the highest throughput of all policies that decide by the bins of all tokens so
    far.
    """
    bins = range(len(chain.values))
    histories = [path for n in range(1, max_tokens) for path in itertools.product(bins, repeat=n)]
    best = 0.0
    for goes_on in itertools.product((False, True), repeat=len(histories)):
        policy = dict(zip(histories, goes_on, strict=True))
        tokens = 1.0
        seconds = target_seconds
        reached = [((bin,), float(chain.first[bin]), float(chain.values[bin])) for bin in bins]
        while reached:
            path, chance, survival = reached.pop()
            tokens = tokens + chance * survival
            seconds = seconds + chance * draft_seconds
            if policy.get(path, False):
                rows = ((b, float(chain.following[path[-1], b])) for b in bins)
                reached += [
                    ((*path, b), chance * share, survival * float(chain.values[b]))
                    for b, share in rows
                ]
        best = max(best, tokens / seconds)
    return best


def exact(chain, draft_seconds, target_seconds, max_tokens):
    """Return the highest throughput, by bisection over the value of a round.

    All survivals that occur are visited.
    """
    bins = range(len(chain.values))

    def worth(throughput):
        def after(number, last, survival):  # the best that can follow a token
            if number == max_tokens:
                return 0.0
            shares = (
                (b, float(chain.following[last, b]), survival * float(chain.values[b]))
                for b in bins
            )
            return max(
                0.0,
                sum(p * (s + after(number + 1, b, s)) for b, p, s in shares)
                - throughput * draft_seconds,
            )

        firsts = ((b, float(chain.first[b]), float(chain.values[b])) for b in bins)
        return (
            1
            - throughput * (target_seconds + draft_seconds)
            + sum(p * (s + after(1, b, s)) for b, p, s in firsts)
        )

    low = 0.0
    high = (max_tokens + 1) / target_seconds
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if worth(middle) > 0 else (low, middle)
    return low


@pytest.mark.parametrize("ratio", [2, 5, 10])
@pytest.mark.parametrize("values", [(0.2, 0.9), (0.0, 1.0), (0.5, 0.7)])
def test_the_best_policy_is_that_of_all_policies_enumerated(values, ratio):
    law = chain(values, (0.4, 0.6), ((0.7, 0.3), (0.2, 0.8)))
    solved = optimal_stopping(law, StepCosts.at_ratio(ratio), max_tokens=4)
    assert solved.throughput == pytest.approx(enumerated(law, 1 / ratio, 1.0, 4), rel=1e-4)


def test_stretches_of_easy_and_hard_tokens_are_no_faster_than_an_exact_solution():
    """The exact value is of a solution over all survivals that a draft of six tokens can have."""
    solved = optimal_stopping(CHAINS["stretches"], StepCosts.at_ratio(5), max_tokens=6)
    assert solved.throughput == pytest.approx(exact(CHAINS["stretches"], 1 / 5, 1.0, 6), rel=1e-6)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_independent_tokens_are_best_drafted_in_one_length(acceptance):
    law = chain([acceptance], [1.0], [[1.0]])
    ratio = 8
    solved = optimal_stopping(law, StepCosts.at_ratio(ratio), max_tokens=20)
    speeds = [
        (1 - acceptance ** (k + 1)) / (1 - acceptance) / (1 + k / ratio) for k in range(1, 21)
    ]
    assert solved.throughput == pytest.approx(max(speeds), rel=1e-4)
    # It goes on after token j exactly where j is below the best length.
    survival = torch.tensor([acceptance**j for j in range(1, 21)])
    goes_on = (survival > solved.least_survival[:, 0]).tolist()
    assert goes_on.index(False) + 1 == 1 + max(range(20), key=speeds.__getitem__)
