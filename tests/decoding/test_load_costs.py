import math

import pytest
import torch
from fakes import tiny_pair

from specheads import SpeculativeDecoder
from specheads.decoding.load_costs import _Observed, kept_costs, measured_costs
from specheads.decoding.records import DecodeStats, Generation, Round
from specheads.decoding.step_costs import TABLES, LoadCosts


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(1, 3), (5, 3), (2, 1)])
def test_tables_cover_what_a_batch_can_have_in_flight(max_batch, max_tokens, tmp_path):
    decoder = SpeculativeDecoder(tiny_pair(), engine="eager")
    costs = measured_costs(decoder, max_batch, max_tokens, context=8, repeats=2)
    assert costs.draft.sizes[0] == 1 and costs.target.sizes[-1] == max((1 + max_tokens) * max_batch, 1 + costs.target.sizes[0])
    for name in TABLES:
        table = getattr(costs, name)
        assert all(math.isfinite(value) and value > 0 for value in table.seconds)
        assert list(table.seconds) == sorted(table.seconds)
    costs.write(tmp_path / "costs.json")
    assert LoadCosts.read(tmp_path / "costs.json") == costs
    assert (costs.provenance["target"], costs.provenance["dtype"]) == ("tiny-target", "torch.float64")


STEP, TOKEN, BESIDES, VERIFIED, ALONE = 0.25, 0.125, 0.5, 0.0625, 3.0
TARGET_POSITION, DRAFT_POSITION, ATTENTION = 2.0**-10, 2.0**-12, 2.0**-11


def made_up(num_rows, drafted, accepted, prompt=9):
    """Rows whose rounds cost what the constants above say: a draft step STEP and TOKEN for each token."""
    rounds, unread, positions = [], prompt, num_rows * prompt
    for number, kept in zip(drafted, accepted, strict=True):
        seconds = 0.0
        if number:
            first = STEP + TOKEN * num_rows * unread
            seconds = BESIDES + first + (number - 1) * (STEP + TOKEN * num_rows) + number * positions * DRAFT_POSITION
            unread = 0
        verify = (VERIFIED * num_rows * (1 + number) if number else ALONE) + positions * (
            TARGET_POSITION + (1 + number) * ATTENTION
        )
        positions += num_rows * (kept + 1)
        rounds.append(Round(list(range(kept + 1)), number, kept, number - kept, number, seconds, verify, 0.0))
        unread = kept + 1 - min(kept, number - 1) if number else unread + 1
    stats = DecodeStats.of(rounds, 0.0)
    row = Generation(torch.zeros(prompt, dtype=torch.long), torch.zeros(9), "", rounds, stats, "length")
    return [row] * num_rows


def test_the_parts_of_a_round_are_told_apart():
    observed = _Observed()
    for num_rows in (1, 2, 4):
        for prompt in (9, 40):
            rows = made_up(num_rows, [2, 0, 1, 3, 2, 0, 1], [2, 0, 0, 3, 1, 0, 1], prompt)
            observed.add(rows)
    costs = observed.costs({})
    for rows in (1, 2, 4):
        assert costs.draft(rows) == pytest.approx(STEP + TOKEN * rows)
        assert costs.drafting(rows) == pytest.approx(BESIDES)
        assert costs.alone(rows) == pytest.approx(ALONE)
        assert costs.target(rows * 3) == pytest.approx(VERIFIED * rows * 3)
    found = costs.target_position, costs.draft_position, costs.target_attention
    assert found == pytest.approx((TARGET_POSITION, DRAFT_POSITION, ATTENTION))
    assert costs.round_seconds(2, 3) == pytest.approx(3 * (STEP + TOKEN * 2) + BESIDES + VERIFIED * 8)
    assert costs.round_seconds(2, 0) == pytest.approx(ALONE)
    more = costs.round_seconds(2, 3, 100) - costs.round_seconds(2, 3)
    assert more == pytest.approx(100 * (TARGET_POSITION + 3 * DRAFT_POSITION + 4 * ATTENTION))  # four tokens of each request


def test_rounds_in_which_a_row_was_at_its_limit_do_not_count():
    observed, rows = _Observed(), made_up(1, [2, 3], [0, 0])
    observed.add(rows + made_up(1, [2, 1], [0, 0]))
    assert set(observed.target) == {6}


def test_a_disturbed_step_does_not_make_larger_ones_look_free():
    """A smaller step takes at most as long as a larger one."""
    observed = _Observed()
    for num_rows in (1, 2, 4):
        observed.add(made_up(num_rows, [2, 0, 1, 3, 2, 0, 1], [2, 0, 0, 3, 1, 0, 1]))
    observed.alone[2] = [(positions, attended, seconds + 5) for positions, attended, seconds in observed.alone[2]]
    assert observed.costs({}).alone.seconds == pytest.approx((ALONE, ALONE, ALONE))


def test_costs_are_kept_for_the_same_machine_pair_and_sizes(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path))
    decoder = SpeculativeDecoder(tiny_pair(), engine="eager", window=32)
    first = kept_costs(decoder, 2, 2)
    assert kept_costs(decoder, 2, 2) == first
    (path,) = (tmp_path / "costs").iterdir()
    assert kept_costs(decoder, 2, 3) != first
    assert len(list((tmp_path / "costs").iterdir())) == 2
    path.write_text("{}")
    assert kept_costs(decoder, 2, 2).target.sizes == first.target.sizes
    assert "cannot be read as costs" in caplog.text and LoadCosts.read(path)
