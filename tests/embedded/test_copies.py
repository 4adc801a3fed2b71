import numpy as np
import pytest

from specheads.embedded.copies import longest_copies


def longest_by_definition(text, response):
    found = 0
    for first in range(len(response)):
        for end in range(first + 1, len(response) + 1):
            run = list(response[first:end])
            if any(list(text[place : place + len(run)]) == run for place in range(len(text) - len(run) + 1)):
                found = max(found, len(run))
    return found


@pytest.mark.parametrize("vocab_size", [2, 3, 20])
def test_every_response_against_the_definition(vocab_size):
    random = np.random.default_rng(vocab_size)
    text = random.integers(0, vocab_size, 60).astype(np.int16)
    responses = [random.integers(0, vocab_size, length).tolist() for length in (1, 5, 12, 20, 0, 20)]
    responses += [text[10:30].tolist(), text[-4:].tolist(), [vocab_size + 1] * 3]
    expected = [longest_by_definition(text, response) for response in responses]
    assert longest_copies(text, responses).tolist() == expected
    assert expected[-3:] == [20, 4, 0]


def test_runs_end_with_a_response_and_with_a_function():
    end = 9
    text = np.array([1, 2, 3, end, 4, 5, 6, end])
    assert longest_copies(text, [[1, 2], [3], [3, 4, 5]]).tolist() == [2, 1, 2]
    assert longest_copies(text, []).tolist() == []
