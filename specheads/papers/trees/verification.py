"""How trees are verified (SpecInfer, Miao et al. 2024): the distribution of a walk down the tree,
and one sample of it.

The walk starts at the context. At every node it moves to one of the children or ends, where the
next token is sampled. A rule computes the probabilities of all moves without randomness; tests
enumerate the same distribution that decoding samples from.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.verification import Verification
from specheads.pair.sampling import accept_prob, at_least_float32, sample

# How the tokens of a tree were chosen.
IID = "a tree of i.i.d. samples"
CHOSEN = "a tree of chosen tokens"
BEAM = "the best beam"

ROOT = -1  # the parent of first nodes: the context


@dataclass
class Draft:
    """A proposal as a token tree, on the host; a chain is the tree without branches.

    Nodes have the numbers in which they were added, so a node's parent comes before it.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)  # 0 for a child of the context
    # Nodes as they were sampled; one that was sampled twice occurs twice
    order: list[int] = field(default_factory=list)
    # (<=N + 1, V), row p + 1 the warped distribution that the children of node p were sampled from,
    # row 0 that of the context's; None where no token was sampled.
    draft_probs: Tensor | None = None
    num_draft_calls: int = 0  # draft forward passes spent on it
    num_copied: int = 0  # a graph's last nodes, which were copied instead of drafted
    nan: bool = (
        False  # whether the draft's logits were NaN or infinite; then the rest means nothing
    )
    _known: dict[tuple[int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        """How many tokens the draft model proposed."""
        return len(self) - self.num_copied

    def add(self, parent: int, token: int, merge: bool = False) -> int:
        """Add a child of `parent` and return its node.

        With `merge`, the node of the same token there if there is one.
        """
        node = self._known.get((parent, token)) if merge else None
        if node is None:
            node = len(self)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depth.append(0 if parent == ROOT else self.depth[parent] + 1)
            self._known[parent, token] = node
        self.order.append(node)
        return node

    def path(self, node: int) -> list[int]:
        """Return the nodes from the context down to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


@dataclass(frozen=True)
class TreeBlock:
    """A drafted tree of N nodes and both models' distributions along it; B is 1.

    Probabilities are float32 or wider, already warped. Of the tensors with N + 1 rows, row p + 1
    belongs to the children of node p, row 0 to those of the context.
    """

    tokens: Tensor  # (N,) long
    depth: Tensor  # (N,) long, 0 for a child of the context
    parent_row: Tensor  # (N,) long, the row that each node and its siblings belong to
    samples: (
        Tensor  # (N + 1, m) long, the nodes sampled there, in sampling order, -1 after the last
    )
    ancestors: Tensor  # (N, N) bool, row i: node i and all its ancestors
    draft_probs: Tensor | None  # (N + 1, V), which the nodes were sampled from
    target_probs: Tensor  # (N + 1, V)
    crowded: Tensor  # (c,) long, the rows with several samples

    @classmethod
    def of(cls, draft: Draft, target_probs: Tensor) -> "TreeBlock":
        """Return the block of a draft and the target's distributions (N + 1, V), on their device.

        ValueError for another N.
        """
        count = len(draft)
        device = target_probs.device
        if len(target_probs) != count + 1:
            raise ValueError(
                f"{count} nodes need {count + 1} distributions of the target, but there are"
                f" {len(target_probs)}"
            )
        sampled: list[list[int]] = [[] for _ in range(count + 1)]
        for node in draft.order:
            sampled[draft.parents[node] + 1].append(node)
        most = max(map(len, sampled))
        ancestors = np.eye(count, dtype=bool)
        for node, parent in enumerate(draft.parents):
            if parent >= 0:
                ancestors[node] |= ancestors[parent]
        draft_probs = draft.draft_probs
        if draft_probs is not None:
            draft_probs = at_least_float32(draft_probs.to(device))
            rows = count + 1 - len(draft_probs)
            draft_probs = (
                torch.nn.functional.pad(draft_probs, (0, 0, 0, rows)) if rows else draft_probs
            )

        def numbers(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        return cls(
            tokens=numbers(draft.tokens),
            depth=numbers(draft.depth),
            parent_row=numbers(draft.parents) + 1,
            samples=numbers([nodes + [-1] * (most - len(nodes)) for nodes in sampled]),
            ancestors=torch.from_numpy(ancestors).to(device),
            draft_probs=draft_probs,
            target_probs=at_least_float32(target_probs),
            crowded=numbers([row for row, nodes in enumerate(sampled) if len(nodes) > 1]),
        )

    @property
    def both_probs(self) -> tuple[Tensor, Tensor]:
        """The distributions of target and draft, (N + 1, V) each, of a tree whose nodes were
        sampled.
        """
        if self.draft_probs is None:
            raise ValueError(
                "the nodes were chosen, not sampled, so there are no distributions of the draft"
            )
        return self.target_probs, self.draft_probs


@dataclass(frozen=True)
class TreeDistribution:
    """The distribution of a verified tree's outcome."""

    # (N,) float64, the probability that the walk, once at a node's parent, moves on to the node
    moves: Tensor
    # (N + 1, V), unnormalised: the next token's distribution where the walk ends; all 0: the
    # target's
    rest: Tensor
    block: TreeBlock

    def next_probs(self, row: Tensor) -> Tensor:
        """Return the unnormalised distribution of the next token (B, V) where the walk ends in
        `row` (B,).
        """
        rest = self.rest[row]
        # Where two distributions differ by rounding alone a residual is empty, and the target's
        # distribution is as close.
        return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, self.block.target_probs[row])

    def decide(self, uniforms: Tensor, next_uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return the accepted nodes (D,), from the context down, -1 after the last, and the
        target's next token (1,).

        The move at each depth follows from `uniforms` (>=D,), the next token from `next_uniform`
        (1,).
        """
        block = self.block
        index = torch.arange(len(self.moves), device=self.moves.device)
        earlier_sibling = (block.parent_row[:, None] == block.parent_row) & (index < index[:, None])
        before = earlier_sibling.double() @ self.moves
        uniform = uniforms[block.depth]
        chosen = (before <= uniform) & (uniform < before + self.moves)
        reached = ~(block.ancestors & ~chosen).any(dim=1)
        places = uniforms.new_full((len(uniforms) + 1,), -1, dtype=torch.long)
        path = places.scatter(0, torch.where(reached, block.depth, len(uniforms)), index)[:-1]
        # The row of the deepest node that is reached, row 0 where none is: argmax returns the first
        # of equal values.
        deepest = torch.nn.functional.pad(torch.where(reached, block.depth + 1, 0), (1, 0))
        return path, sample(self.next_probs(deepest.argmax(dim=0, keepdim=True)), next_uniform)


class TreeVerification(Verification):
    """The base of rules for trees, which verify each tree whatever happened before."""

    takes = frozenset({IID, CHOSEN, BEAM})

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        """Return the distribution of the outcome."""
        raise NotImplementedError


class MultiRound(TreeVerification):
    """`verification=multi_round`: the tokens sampled at a node are tested one after the other.

    Each is tested against the target's residual after the earlier rejections, even if the same
    token was sampled before.

    Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyStochastic.
    """

    name = "multi_round"
    compile_key = "multi round"
    label = "multi-round verification"
    takes = frozenset({IID})

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        target, draft = block.both_probs
        moves = torch.zeros(len(block.tokens), dtype=torch.float64, device=target.device)
        # The probability that all samples so far were rejected.
        reach = torch.ones(len(target), dtype=torch.float64, device=target.device)
        for number in range(block.samples.shape[1]):
            there = block.samples[:, number] >= 0
            node = block.samples[:, number].clamp_min(0)
            token = block.tokens[node][:, None]
            passes = (
                accept_prob(target.gather(1, token), draft.gather(1, token)).squeeze(1).double()
            )
            passes = torch.where(there, passes, 0.0)
            moves = moves.index_add(0, node, reach * passes)
            reach = reach * (1 - passes)
            residual = (target - draft).clamp_min(0)
            mass = residual.sum(dim=1, keepdim=True)
            target = torch.where(
                there[:, None] & (mass > 0),
                residual / mass.clamp_min(torch.finfo(mass.dtype).tiny),
                target,
            )
        return TreeDistribution(moves, target, block)


class TreeMatch(TreeVerification):
    """`verification=tree_match`: the target samples a token, and the walk continues at the child
    that has it.

    A move has the target's probability of the node's token. Lossless for every tree that was fixed
    before the target sampled, however its tokens were chosen.

    Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyGreedy.
    """

    name = compile_key = "tree_match"
    label = "tree matching"

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        rest = block.target_probs.clone()
        row = block.parent_row
        token = block.tokens
        moves = rest[row, token].double()
        index = torch.arange(len(token), device=token.device)
        repeats = (row[:, None] == row) & (token[:, None] == token) & (index < index[:, None])
        rest[row, token] = 0
        return TreeDistribution(torch.where(repeats.any(dim=1), 0.0, moves), rest, block)
