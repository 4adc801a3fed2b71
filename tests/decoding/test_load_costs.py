import pytest
import torch
from fakes import tiny_pair

from specheads import SpeculativeDecoder
from specheads.decoding.load_costs import _rounds_of, fitted, measured_load_costs
from specheads.decoding.records import DecodeStats, Generation, Round


@pytest.mark.parametrize(("max_batch", "max_tokens", "window"), [(1, 3, None), (5, 3, None), (2, 1, None), (2, 8, 12)])
def test_costs_cover_what_a_batch_can_do(max_batch, max_tokens, window):
    decoder = SpeculativeDecoder(tiny_pair(), engine="eager", window=window)
    costs = measured_load_costs(decoder, max_batch, max_tokens, context=8, repeats=1)
    assert (costs.rows[0], costs.rows[-1]) == (1, max_batch) and costs.position >= 0
    for rows, more in zip(costs.rounds, [*costs.rounds[1:], costs.rounds[-1]], strict=True):
        assert len(rows) == 1 + max_tokens and all(0 < few <= many for few, many in zip(rows, more, strict=True))


def generation(drafted, seconds, prompt=9):
    """A row that emits two tokens in every round."""
    rounds = [Round([0, 0], n, 1, n - 1, n, each, each, each, wait_seconds=9.0) for n, each in zip(drafted, seconds, strict=True)]
    stats = DecodeStats.of(rounds, 0.0)
    return Generation(torch.zeros(prompt, dtype=torch.long), torch.zeros(9), "", rounds, stats, "length")


def test_rounds_count_that_read_no_prompts_and_in_which_no_row_was_at_its_limit():
    rows = [generation([2, 2, 2, 2], [1.0, 2.0, 3.0, 4.0]), generation([2, 2, 1], [1.0, 2.0, 3.0])]
    assert list(_rounds_of(rows, 2)) == [(18 + 4, 6.0)]
    assert list(_rounds_of(rows[:1], 2)) == [(11, 6.0), (13, 9.0), (15, 12.0)]


EMPTY = {1: (3.0, 5.0, 7.0), 2: (4.0, 7.0, 10.0), 4: (6.0, 11.0, 16.0)}


def test_costs_are_those_that_rounds_were_made_of():
    """Lengths that were not timed are between their neighbours, and a disturbed round does not count."""
    timed = {
        (rows, length): [(n, seconds[length] + n * (1 + length) / 64) for n in (10, 20, 30, 40, 50)]
        for rows, seconds in EMPTY.items()
        for length in (0, 2)
    }
    timed[1, 0][2] = (30, 99.0)
    costs = fitted(timed)
    assert costs.rows == [1, 2, 4] and costs.position == pytest.approx(1 / 64)
    for made, seconds in zip(costs.rounds, EMPTY.values(), strict=True):
        assert made == pytest.approx(seconds)


def test_a_disturbed_size_does_not_make_larger_ones_look_free():
    costs = fitted({(1, 0): [(10, 1.0)] * 3, (2, 0): [(10, 5.0)] * 3, (4, 0): [(10, 2.0)] * 3})
    assert costs.rounds == [[1.0], [2.0], [2.0]] and costs.position == 0
