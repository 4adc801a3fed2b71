"""How token trees are judged: a law of the walk from the context down the tree and of the token where it ends, and one draw from it.

At every node the walk moves to one of the children or ends there. A rule computes the chances of all moves without randomness; tests
enumerate the same law that decoding draws from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.records import Draft, DraftKind, Verdict
from specheads.sampling import at_least_float32, sample


@dataclass(frozen=True)
class TreeBlock:
    """A drafted tree of N nodes and what both models say of it; B is 1. Laws are of float32 or wider, already warped.

    Row p + 1 of what has N + 1 rows speaks of what comes after node p, row 0 of what comes after the context.
    """

    tokens: Tensor  # (N,) long
    depth: Tensor  # (N,) long, 0 for a child of the context
    parent_row: Tensor  # (N,) long, the row that speaks of each node's siblings
    draws: Tensor  # (N + 1, m) long, the nodes that were drawn there, in the order of drawing, -1 behind the last
    ancestors: Tensor  # (N, N) bool, row i: node i and all above it
    draft_probs: Tensor | None  # (N + 1, V), what the draws came from
    target_probs: Tensor  # (N + 1, V)
    replacement: bool = True  # whether a token could be drawn twice after the same node
    crowded: Tensor | None = None  # (c,) long, the rows with several draws

    @classmethod
    def of(cls, draft: Draft, target_probs: Tensor) -> "TreeBlock":
        """Return the block of a draft and the target's laws (N + 1, V), on the device of these.

        Raises:
            ValueError: numbers of nodes that do not fit together.
        """
        count, device = len(draft.tokens), target_probs.device
        if len(target_probs) != count + 1:
            raise ValueError(f"{count} nodes need {count + 1} laws of the target, but there are {len(target_probs)}")
        parents, order = draft.parents.tolist(), draft.order.tolist()
        drawn: list[list[int]] = [[] for _ in range(count + 1)]
        for node in order:
            drawn[parents[node] + 1].append(node)
        most = max(map(len, drawn))
        table = torch.tensor([nodes + [-1] * (most - len(nodes)) for nodes in drawn], dtype=torch.long)
        draft_probs = draft.draft_probs
        if draft_probs is not None:
            draft_probs = at_least_float32(draft_probs.to(device))
            rows = count + 1 - len(draft_probs)
            draft_probs = torch.nn.functional.pad(draft_probs, (0, 0, 0, rows)) if rows else draft_probs
        crowded = torch.tensor([row for row, nodes in enumerate(drawn) if len(nodes) > 1], dtype=torch.long)
        small = (draft.tokens, draft.depth, draft.parents + 1, table, lineage(parents), crowded)
        *tensors, crowded = (tensor.to(device) for tensor in small)
        return cls(*tensors, draft_probs, at_least_float32(target_probs), draft.replacement, crowded)

    @property
    def most_draws(self) -> int:
        return self.draws.shape[1]


def lineage(parents: Sequence[int]) -> Tensor:
    """Return for nodes with these parents, each before its children, who is above whom: (N, N) bool, row i node i and all above it."""
    ancestors = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    return torch.from_numpy(ancestors)


@dataclass(frozen=True)
class TreeDistribution:
    """The law by which a rule judges a tree."""

    moves: Tensor  # (N,) float64, the chance that the walk, once at a node's parent, moves on to the node
    rest: Tensor  # (N + 1, V), unnormalised: what the next token follows where the walk ends; the target's own law where it is all 0
    block: TreeBlock

    def next_probs(self, row: Tensor) -> Tensor:
        """Return the unnormalised law of the next token (B, V) where the walk ends in `row` (B,)."""
        rest = self.rest[row]
        # Where two laws differ by rounding alone a residual is empty, and the target's own law is as near.
        return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, self.block.target_probs[row])

    def decide(self, draws: Tensor, next_draw: Tensor) -> Verdict:
        """Return the verdict at given uniform numbers: `draws` (>=D,) for the move at each depth, `next_draw` (1,) for the next token."""
        block, count = self.block, len(self.moves)
        index = torch.arange(count, device=self.moves.device)
        earlier_sibling = (block.parent_row[:, None] == block.parent_row) & (index < index[:, None])
        before = earlier_sibling.double() @ self.moves
        draw = draws[block.depth]
        chosen = (before <= draw) & (draw < before + self.moves)
        reached = ~(block.ancestors & ~chosen).any(dim=1)
        places = draws.new_full((len(draws) + 1,), -1, dtype=torch.long)
        path = places.scatter(0, torch.where(reached, block.depth, len(draws)), index)[:-1]
        num_accepted = reached.sum(dim=0, keepdim=True)
        row = torch.where(reached, block.depth + 1, 0)
        row = torch.where(num_accepted > 0, row.argmax(dim=0, keepdim=True) + 1, 0) if count else num_accepted
        next_token = sample(self.next_probs(row), next_draw)
        return Verdict(num_accepted=num_accepted, next_token=next_token, accepted_nodes=path[None])


class TreeVerification:
    """A rule for trees, which judges every one by a law of its own, whatever happened before."""

    lossless = True
    stopping = None
    takes = frozenset(DraftKind)

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        raise NotImplementedError
