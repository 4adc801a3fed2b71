"""Which branches are drafted together."""

import torch

from specheads.decoding.branches import branch_batches


def test_branches_of_similar_size_share_a_batch_within_both_limits():
    positions = torch.tensor([9, 3, 5, 3, 4, 9, 3, 50])
    batches = [rows.tolist() for rows in branch_batches(positions, most_positions=12, most_rows=2)]
    assert batches == [[1, 3], [6], [4, 2], [0], [5], [7]]  # four of size 4 would take 16 positions
    assert [rows.tolist() for rows in branch_batches(positions, 1000, 100)] == [[1, 3, 6, 4, 2, 0, 5, 7]]


def test_no_branches_make_no_batch():
    assert list(branch_batches(torch.zeros(0, dtype=torch.long), 12, 2)) == []
