"""The check of long runs tells growth, sees an output that changed, and its parts run."""

import mmap
import os

import pytest

from tests import soak

SMALL = [
    "--size",
    "1",
    "--engine",
    "eager",
    "--minutes",
    "0",
    "--generations",
    "4",
    "--checked",
    "2",
]


def test_growth_is_that_from_the_second_quarter_to_the_last():
    samples = [
        {"memory": 5.0 if number < 2 else 100.0 + number, "files": 6.0} for number in range(8)
    ]
    assert soak.gains(samples) == {"memory": pytest.approx(106.5 / 102.5 - 1), "files": 0}


def test_what_a_process_holds_is_counted():
    before = soak.usage()
    kept = mmap.mmap(-1, 2**26)  # from the system: an array may get what was freed before
    kept.write(bytes(2**26))
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    objects = [object() for _ in range(1000)]
    gained = {name: value - before[name] for name, value in soak.usage().items()}
    for descriptor in descriptors:
        os.close(descriptor)
    assert gained["open files"] == 3 and gained["resident memory, bytes"] > 0.9 * len(kept)
    assert gained["Python's blocks in use"] >= len(objects)


def test_outputs_are_the_same_amid_and_after_others(monkeypatch):
    assert soak.main(["outputs", *SMALL]) == 0
    calls = []

    def drifting(decoder, prompts, seeds):
        calls.append(len(prompts))
        return [[len(calls) > 3, 1]] * len(prompts)

    monkeypatch.setattr(soak, "single_tokens", drifting)
    assert soak.main(["outputs", *SMALL]) == 1
