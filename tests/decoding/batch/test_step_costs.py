import math

import pytest
from fakes import tiny_pair

from specheads import Warp
from specheads.decoding.batch.step_costs import measured_costs, without_falls
from specheads.decoding.load.costs import LoadCosts


@pytest.mark.parametrize("max_batch", [1, 5])
def test_the_table_covers_what_a_batch_can_have_in_flight(max_batch, tmp_path):
    costs = measured_costs(tiny_pair(), Warp(), max_batch, engine="eager", context=8, repeats=2, max_tokens=3)
    assert costs.draft.sizes[-1] == max(2, max_batch) and costs.target.sizes[-1] == 4 * max_batch
    for table in (costs.draft, costs.target):
        assert all(math.isfinite(value) and value > 0 for value in table.seconds)
        assert list(table.seconds) == sorted(table.seconds)
    costs.write(tmp_path / "costs.json")
    assert LoadCosts.read(tmp_path / "costs.json") == costs
    assert (costs.provenance["target"], costs.provenance["dtype"]) == ("tiny-target", "torch.float64")


def test_a_disturbed_step_does_not_make_larger_ones_look_free():
    assert without_falls([9.0, 1.0, 2.0, 4.0, 3.0]) == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert without_falls([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
