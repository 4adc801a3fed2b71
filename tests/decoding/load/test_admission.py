"""The frontier: the same as its heap, and what raises and lowers it."""

import heapq

import numpy as np
import pytest

from specheads.decoding.load.admission import frontier, survival_of
from specheads.decoding.load.costs import SecondsTable

CONVEX = SecondsTable((1, 12, 20, 30), (1.0, 1.0, 1.6, 3.0))


def heap_frontier(survival, lengths, seconds, base_tokens, other_seconds, throughput):
    """DSpark's algorithm 1, literally: a heap of each request's next token."""
    heap = [(-survival[row, 0], row, 0) for row in range(len(survival)) if lengths[row]]
    heapq.heapify(heap)
    submitted, expected, in_flight = np.zeros(len(survival), dtype=int), float(len(survival)), base_tokens
    while heap:
        loss, row, place = heapq.heappop(heap)
        before, after = (other_seconds + seconds(size) for size in (in_flight, in_flight + 1))
        rises = -loss > throughput * (after - before) if throughput else (expected - loss) / after > expected / before
        if not rises:
            break
        expected, in_flight = expected - loss, in_flight + 1
        submitted[row] += 1
        if place + 1 < lengths[row]:
            heapq.heappush(heap, (-survival[row, place + 1], row, place + 1))
    return submitted


@pytest.mark.parametrize("throughput", [None, 4.0, 9.0])
@pytest.mark.parametrize("seed", range(40))
def test_the_frontier_is_that_of_the_heap(seed, throughput):
    """Also where survival rises along a request, which it does in most of these."""
    rng = np.random.default_rng(seed)
    survival, lengths = rng.random((5, 4)), rng.integers(5, size=5)
    expected = heap_frontier(survival, lengths, CONVEX, 5, 0.3, throughput)
    actual = frontier(survival, lengths, CONVEX, 5, 0.3, throughput)
    assert actual.tolist() == expected.tolist()


def test_the_frontiers_of_these_cases_differ_from_each_other():
    cases = {tuple(frontier(np.random.default_rng(s).random((5, 4)), np.full(5, 4), CONVEX, 5, 0.3)) for s in range(40)}
    assert len(cases) > 20


def test_survival_is_the_acceptance_of_earlier_tokens_times_the_overlap_of_this_one():
    acceptance, overlap = np.array([[0.5, 0.8, 0.0]]), np.array([[0.9, 0.6, 0.25]])
    assert survival_of(acceptance, overlap) == pytest.approx(np.array([[0.9, 0.5 * 0.6, 0.5 * 0.8 * 0.25]]))


def test_all_is_submitted_where_it_costs_nothing_and_nothing_where_it_costs_more_than_it_adds():
    survival, lengths = np.full((3, 4), 0.01), np.array([4, 0, 2])
    flat, steep = SecondsTable((1, 100, 101), (1.0, 1.0, 2.0)), SecondsTable((1, 2), (1.0, 2.0))
    assert frontier(survival, lengths, flat, 3).tolist() == [4, 0, 2]
    assert frontier(survival, lengths, steep, 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("throughput", [None, 1.0])
def test_a_token_that_only_keeps_the_throughput_is_not_submitted(throughput):
    """One and a half tokens in one and a half seconds are as many per second as one in one; these numbers are exact."""
    lengths, seconds = np.array([1]), SecondsTable((1, 2), (1.0, 1.5))
    assert frontier(np.array([[0.5]]), lengths, seconds, 1, throughput=throughput).tolist() == [0]
    assert frontier(np.array([[0.5625]]), lengths, seconds, 1, throughput=throughput).tolist() == [1]


def test_a_request_gives_up_its_place_to_one_with_more_survival():
    survival = np.array([[0.9, 0.8, 0.7], [0.75, 0.1, 0.05]])
    only_two = SecondsTable((1, 4, 5), (1.0, 1.0, 9.0))
    assert frontier(survival, np.array([3, 3]), only_two, 2).tolist() == [2, 0]
    assert frontier(survival[::-1], np.array([3, 3]), only_two, 2).tolist() == [0, 2]


def test_a_staircase_stops_at_its_edge_and_its_envelope_does_not():
    survival, lengths = np.full((4, 6), 0.9), np.full(4, 6)
    staircase = SecondsTable((1, 8, 9, 16, 17, 24), (1.0, 1.0, 1.2, 1.2, 1.4, 1.4))
    assert frontier(survival, lengths, staircase, 4).sum() == 4
    assert frontier(survival, lengths, staircase.envelope(), 4).sum() == 24


def test_more_prompts_in_the_same_step_leave_less_to_drafts():
    survival, lengths = np.random.default_rng(0).random((8, 4)), np.full(8, 4)
    sizes = [frontier(survival, lengths, CONVEX, 8 + prompts, throughput=6.0).sum() for prompts in (0, 2, 6, 16)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 2
