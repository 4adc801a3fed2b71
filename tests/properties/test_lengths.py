"""Batches and slices by length."""

from hypothesis import given
from hypothesis import strategies as st
from properties.strategies import tries

from specheads.pair.padding import batches_of_tokens, by_length, slices

lengths = st.lists(st.integers(0, 40), max_size=30)


@tries(5)
@given(lengths, st.integers(1, 200))
def test_batches_of_tokens_hold_every_row_once_and_are_as_large_as_the_limit_allows(sizes, limit):
    batches = batches_of_tokens(sizes, limit)
    order = [row for batch in batches for row in batch]
    assert order == by_length(sizes) == sorted(range(len(sizes)), key=lambda row: (sizes[row], row))

    def padded(batch):
        return len(batch) * max(sizes[row] for row in batch)

    for number, batch in enumerate(batches):
        assert batch and (len(batch) == 1 or padded(batch) <= limit)
        assert number + 1 == len(batches) or padded([*batch, batches[number + 1][0]]) > limit


@tries(5)
@given(st.integers(0, 100), st.integers(1, 50), st.integers(1, 500))
def test_slices_are_consecutive_and_as_large_as_the_limit_allows(num_rows, row_size, most):
    parts = slices(num_rows, row_size, most)
    assert [row for part in parts for row in range(num_rows)[part]] == list(
        range(num_rows)
    ) and parts
    sizes = [part.stop - part.start for part in parts]
    assert all(size * row_size <= most or size == 1 for size in sizes)
    assert len(set(sizes[:-1])) <= 1 and (len(parts) == 1 or (sizes[0] + 1) * row_size > most)
