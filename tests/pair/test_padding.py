"""Batches of rows of different lengths: every row once, within the limit, and always the same."""

import numpy as np
import pytest

from specheads.pair.padding import right_padded


@pytest.mark.parametrize("of", [list, np.array, lambda text: np.array(text, dtype=np.int32)])
def test_padding_goes_to_the_right_of_texts_that_are_read_whole(of):
    assert right_padded([of([5]), of([6, 7, 8]), of([9, 9])]).tolist() == [
        [5, 0, 0],
        [6, 7, 8],
        [9, 9, 0],
    ]
    assert right_padded([[1, 2], []]).tolist() == [[1, 2], [0, 0]]
