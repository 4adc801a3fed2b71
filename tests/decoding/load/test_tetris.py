"""TETRIS."""

import pytest
from load_drafts import drafts_of

from specheads import UserError
from specheads.decoding.load.tetris import Tetris

PROBS = {"draft_prob": [[0.9, 0.9, 0.9], [0.5, 0.9, 0.9], [0.8, 0.3, 0.9]]}


@pytest.mark.parametrize(
    ("capacity", "expected"), [(1, [1, 0, 0]), (2, [2, 0, 0]), (3, [2, 0, 1]), (4, [3, 0, 1]), (5, [3, 1, 1]), (99, [3, 3, 3])]
)
def test_the_largest_products_fill_the_capacity(capacity, expected):
    assert Tetris(capacity, 3).admit(drafts_of(PROBS)).tolist() == expected


def test_it_says_that_it_is_lossy():
    assert not Tetris.lossless


def test_a_capacity_of_nothing_is_refused():
    with pytest.raises(UserError, match="capacity=0 must be a positive integer"):
        Tetris(0)
