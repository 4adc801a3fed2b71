"""Tables of seconds: between, beyond and below their entries, and their convex envelopes."""

import json

import numpy as np
import pytest

from specheads import UserError
from specheads.decoding.load.costs import LARGEST_SIZE, MOST_SECONDS, POSITIONS, PROVENANCE, LoadCosts, SecondsTable

STAIRCASE = SecondsTable((1, 8, 9, 16, 17, 32), (1.0, 1.0, 2.0, 2.0, 3.0, 5.0))


def test_seconds_are_linear_between_entries_and_beyond_the_last_and_constant_below_the_first():
    table = SecondsTable((2, 4, 8), (1.0, 3.0, 5.0))
    assert table(np.array([1, 2, 3, 4, 6, 8, 10])).tolist() == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert table.last_slope == 0.5


def test_the_envelope_of_a_staircase_touches_its_outer_corners():
    sizes, envelope = np.arange(1, 60), STAIRCASE.envelope()
    below = STAIRCASE(sizes) - envelope(sizes)
    assert (below > -1e-12).all()
    assert (np.diff(envelope(sizes), 2) > -1e-12).all()  # convex
    assert sizes[np.abs(below) < 1e-12].tolist() == [*range(1, 9), 16]  # beyond 16 with the last slope, which is the flattest


def test_the_envelope_of_convex_seconds_is_themselves():
    table, sizes = SecondsTable((1, 10, 20, 30), (1.0, 1.0, 2.0, 4.0)), np.arange(1, 60)
    assert table.envelope()(sizes) == pytest.approx(table(sizes), abs=1e-12)


def test_no_convex_function_below_rises_faster_than_the_last_slope():
    """Seconds that flatten: their envelope is the line of the last slope through the lowest point for it."""
    table, sizes = SecondsTable((1, 2, 10, 20), (1.0, 5.0, 6.0, 6.5)), np.arange(1, 60)
    envelope = table.envelope()
    assert envelope(sizes) == pytest.approx(1.0 + 0.05 * (sizes - 1))
    assert (envelope(sizes) <= table(sizes) + 1e-12).all()


@pytest.mark.parametrize("seed", range(20))
def test_the_envelope_is_the_largest_convex_function_below(seed):
    """Every convex combination of two points of the table bounds it from above, and the smallest of them is reached."""
    rng = np.random.default_rng(seed)
    seconds = rng.random(8) + 0.1
    seconds[-1] = seconds[-2] + rng.random()
    table, sizes = SecondsTable(tuple(range(1, 9)), tuple(seconds.tolist())), np.arange(1, 400)
    values = table(sizes)
    for size in (1, 2, 4, 7):
        left, right = sizes[sizes <= size], sizes[sizes >= size]
        span = np.maximum(right[None] - left[:, None], 1)
        share = (size - left[:, None]) / span
        chords = values[left - 1][:, None] * (1 - share) + values[right - 1][None] * share
        # The last chord ends at 399, not at infinity, so it can lie a little above the envelope.
        assert table.envelope()(size) == pytest.approx(chords.min(), abs=0.05)
        assert table.envelope()(size) <= chords.min() + 1e-12


def test_flat_until_is_the_last_size_that_costs_no_more_than_the_first():
    assert STAIRCASE.flat_until == 8
    assert SecondsTable((1, 2), (1.0, 2.0)).flat_until == 1


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ((1,), (1.0,), "two entries"),
        ((1, 2), (1.0,), "two entries"),
        ((2, 1), (1.0, 2.0), "rising order"),
        ((1, 1), (1.0, 2.0), "rising order"),
        ((0, 1), (1.0, 2.0), "positive integers"),
        ((-1, 1), (1.0, 2.0), "positive integers"),
        ((1, 1.5), (1.0, 2.0), "positive integers"),
        ((1, LARGEST_SIZE + 1), (1.0, 2.0), f"at most {LARGEST_SIZE}"),
        ((1, 2), (0.0, 1.0), "positive numbers"),
        ((1, 2), (1.0, 2 * MOST_SECONDS), "at most 1e.09"),
        ((1, 2), (1.0, float("nan")), "positive numbers"),
        ((1, 2), (1.0, -2.0), "positive numbers"),
        ((1, 2), (2.0, 1.0), "must not fall at the end"),
    ],
)
def test_bad_tables_are_refused(sizes, seconds, message):
    with pytest.raises(UserError, match=message):
        SecondsTable(sizes, seconds)


def test_the_largest_entries_are_allowed_and_points_on_a_line_are_left_out_of_an_envelope():
    assert SecondsTable((1, LARGEST_SIZE), (1.0, MOST_SECONDS))(LARGEST_SIZE) == MOST_SECONDS
    assert SecondsTable((1, 2, 3, 4), (1.0, 1.0, 1.0, 2.0)).envelope().sizes == (1, 3, 4)
    assert SecondsTable((1, 2, 3), (1.0, 2.0, 3.0)).envelope().sizes == (1, 2)


def costs_of(**more):
    return LoadCosts(SecondsTable((1, 2), (1.0, 1.5)), STAIRCASE, **more)


def test_a_round_takes_its_steps_and_what_is_besides_them():
    """The draft takes 1 and 1.5 s for 1 and 2 requests; the envelope of the staircase is 2 s at 16 tokens, 1.125 at 9."""
    assert costs_of().round_seconds(2, 3, 16) == pytest.approx(3 * 1.5 + 2)
    assert costs_of().round_seconds(2, 3, np.array([9, 16])) == pytest.approx(3 * 1.5 + np.array([1.125, 2]))
    assert costs_of().round_seconds(2, 0, 16) == pytest.approx(2)
    drafting, admission = SecondsTable((1, 2), (10.0, 20.0)), SecondsTable((1, 2), (30.0, 40.0))
    more = costs_of(drafting=drafting, admission=admission, alone=SecondsTable((1, 2), (7.0, 8.0)))
    assert more.round_seconds(2, 3, 16) == pytest.approx(3 * 1.5 + 20 + 2) and more.round_seconds(2, 0, 2) == 8
    assert (more.besides(1), more.weighing(1), more.besides(2), more.weighing(2)) == (10, 30, 20, 40)
    assert costs_of().besides(2) == costs_of().weighing(2) == 0


def test_positions_in_memory_cost_each_model_that_reads_them():
    """Of 100 positions of 2 requests, each of 16 tokens in flight attends to those of its request, 50."""
    one = {name: costs_of(**{name: 0.5}) for name in POSITIONS}
    more = {name: costs.round_seconds(2, 3, 16, 100) - costs_of().round_seconds(2, 3, 16) for name, costs in one.items()}
    assert more == {"target_position": 50, "draft_position": 150, "target_attention": 16 * 50 * 0.5}
    alone = {name: costs.round_seconds(2, 0, 16, 100) - costs_of().round_seconds(2, 0, 16) for name, costs in one.items()}
    assert alone == {"target_position": 50, "draft_position": 0, "target_attention": 16 * 50 * 0.5}
    for costs in one.values():
        assert costs.round_seconds(2, 3, 16) == costs_of().round_seconds(2, 3, 16)


def test_verification_counts_what_its_tokens_attend_to():
    seconds = costs_of(target_attention=0.5).verification(50)
    assert seconds(16) == pytest.approx(2 + 16 * 50 * 0.5)
    assert seconds(np.array([1, 16])) == pytest.approx([1 + 25, 2 + 400])
    assert costs_of().verification(50)(16) == pytest.approx(2)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("value", [-1e-9, 2 * MOST_SECONDS, float("nan"), float("inf"), True, "1"])
def test_bad_seconds_of_positions_are_refused(name, value):
    with pytest.raises(UserError, match=f"{name}={value} must be seconds from 0 to 1e.09"):
        costs_of(**{name: value})
    assert getattr(costs_of(**{name: MOST_SECONDS}), name) == MOST_SECONDS


def test_costs_are_read_as_they_were_written(tmp_path):
    provenance = dict.fromkeys(PROVENANCE, "x")
    costs = LoadCosts(SecondsTable((1, 2), (1.0, 1.5)), STAIRCASE, provenance, target_position=0.25, draft_position=0.125)
    costs.write(tmp_path / "costs.json")
    assert LoadCosts.read(tmp_path / "costs.json") == costs


def test_costs_that_do_not_say_where_they_come_from_are_refused(tmp_path):
    path = tmp_path / "costs.json"
    table = {"sizes": [1, 2], "seconds": [1.0, 2.0]}
    whole = {"draft": table, "target": table, "provenance": dict.fromkeys(PROVENANCE, "x")}
    path.write_text(json.dumps(whole))
    assert LoadCosts.read(path) == LoadCosts(*2 * [SecondsTable((1, 2), (1.0, 2.0))], whole["provenance"])
    for content, message in (
        ("{", "cannot be read as costs"),
        ("[]", "must have draft, target and provenance"),
        (json.dumps({"draft": table, "target": table, "provenance": {"target": "x"}}), "does not say its draft"),
        (json.dumps({"draft": table, "target": table, "provenance": 1}), "does not say its target; .* target, draft, device, "),
        (json.dumps(whole | {"draft": []}), f"{path}: draft must have sizes and seconds"),
        (json.dumps(whole | {"target": table | {"sizes": [2, 1]}}), f"{path}: target: sizes=.2, 1. must be"),
        (json.dumps(whole | {"alone": table | {"seconds": [10**400, 1]}}), f"{path}: alone: int too large"),
        (json.dumps(whole | {"draft_position": -1}), f"{path}: draft_position=-1 must be seconds"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            LoadCosts.read(path)
