"""Damaged files of every kind are refused in one message, or read as before: no other error, and
nothing wrong in silence.

`SPECHEADS_MUTATIONS` is the number of mutations of each kind.
"""

import os

import pytest

from tests.mutations.kinds import KINDS
from tests.mutations.trial import tried

NUMBER = int(os.environ.get("SPECHEADS_MUTATIONS", "50"))


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_refused_or_read_as_before(name, tmp_path):
    kind = KINDS[name]
    outcomes = tried(kind, tmp_path / "files", max(1, round(NUMBER * kind.share)))
    assert not outcomes.failures, "\n\n".join(outcomes.failures[:3])
    assert outcomes.counts["refused"] + outcomes.counts["as before"] > 0
