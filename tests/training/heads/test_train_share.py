"""A share is the first prompts with all their responses, and a row is the same in every share."""

import pytest

from specheads.training.heads.mixed_responses import Rows, first_rows

TWICE = ["a", "b", "c", "d", "a", "b", "c", "d"]  # first responses come before second ones


@pytest.mark.parametrize(
    ("share", "rows"), [(1, range(8)), (0.75, [0, 1, 2, 4, 5, 6]), (0.5, [0, 1, 4, 5]), (0.25, [0, 4]), (0.01, [0, 4])]
)
def test_all_responses_to_a_prompt_go_with_it(share, rows):
    assert first_rows(TWICE, share) == list(rows)


def test_a_larger_share_holds_every_smaller_one():
    ids = [f"{number}" for number in range(37)]
    shares = [first_rows(ids, share) for share in (0.0625, 0.125, 0.25, 0.5, 1)]
    assert [len(rows) for rows in shares] == [2, 5, 9, 18, 37]
    assert all(rows == list(range(len(rows))) for rows in shares)


def test_rows_keep_the_numbers_of_the_split():
    class Split:
        def __getitem__(self, key):
            return key

    rows = Rows(Split(), first_rows(TWICE, 0.5))
    assert [rows[3, number] for number in range(len(rows))] == [(3, 0), (3, 1), (3, 4), (3, 5)]
