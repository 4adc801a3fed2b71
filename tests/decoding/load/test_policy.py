"""Which rows draft, and which outcomes are known."""

import numpy as np
import pytest
from load_drafts import blank, drafted, drafts_of

from specheads import UserError
from specheads.decoding.load.lengths import FixedK
from specheads.decoding.load.policy import LoadPolicy, decided, drafting_rows


def test_rows_end_at_their_capacity_at_an_end_token_and_where_they_stopped():
    drafts = drafts_of(blank(4), lengths=[2, 2, 2, 1], capacity=[5, 2, 5, 5])
    ended = np.array([False, False, True, False])
    assert drafting_rows(LoadPolicy(3), drafts, ended, 3).tolist() == [True, False, False, False]
    assert drafting_rows(LoadPolicy(3), drafts, ended, 2).tolist() == [False] * 4


def test_a_round_without_drafts():
    drafts = drafted(FixedK(0), blank(3))
    assert drafts.longest == 0 and drafts.places.shape == (3, 0)
    assert drafts_of(blank(3), lengths=[0, 2, 1], prompt_tokens=7).base_tokens == 10


def test_the_accepted_tokens_and_the_first_rejected_one_are_known():
    drafts = drafts_of(blank(4, 3), lengths=[3, 3, 2, 0])
    accepted, known = decided(drafts, np.array([3, 2, 2, 0]), np.array([1, 2, 0, 0]))
    assert accepted.tolist() == [[True, False, False], [True, True, False], [False] * 3, [False] * 3]
    assert known.tolist() == [[True, True, False], [True, True, False], [True, False, False], [False] * 3]


def test_a_negative_length_is_refused():
    with pytest.raises(UserError, match="max_tokens=-1 must be a non-negative integer"):
        FixedK(-1)
