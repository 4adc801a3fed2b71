"""Batches of rows of different lengths: every row once, within the limit, and always the same."""

import itertools

import numpy as np
import pytest
import torch

from specheads.pair.padding import batches_of_tokens, by_length, right_padded, slices


@pytest.mark.parametrize("max_tokens", [1, 9, 20, 1000])
def test_batches_of_tokens_are_as_large_as_the_limit_allows(max_tokens):
    lengths = np.random.default_rng(max_tokens).integers(1, 12, size=15).tolist()
    batches = batches_of_tokens(lengths, max_tokens)
    assert [row for batch in batches for row in batch] == by_length(lengths)
    sizes = [len(batch) * max(lengths[row] for row in batch) for batch in batches]
    assert all(
        size <= max_tokens or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True)
    )
    for batch, after in itertools.pairwise(batches):  # the next row would have been too much
        assert (len(batch) + 1) * lengths[after[0]] > max_tokens


@pytest.mark.parametrize("num_rows", [0, 1, 7, 1000])
@pytest.mark.parametrize("row_size", [1, 5, 150_000, 2**25])
def test_slices_cover_every_row_once(num_rows, row_size):
    pieces = slices(num_rows, row_size, 2**24)
    assert pieces and [row for piece in pieces for row in range(num_rows)[piece]] == list(
        range(num_rows)
    )
    assert all((piece.stop - piece.start) * row_size <= max(2**24, row_size) for piece in pieces)
    assert torch.cat([torch.zeros(num_rows, 3)[piece] for piece in pieces]).shape == (num_rows, 3)


@pytest.mark.parametrize("of", [list, np.array, lambda text: np.array(text, dtype=np.int32)])
def test_padding_goes_to_the_right_of_texts_that_are_read_whole(of):
    assert right_padded([of([5]), of([6, 7, 8]), of([9, 9])]).tolist() == [
        [5, 0, 0],
        [6, 7, 8],
        [9, 9, 0],
    ]
    assert right_padded([[1, 2], []]).tolist() == [[1, 2], [0, 0]]
