"""How trees are verified (SpecInfer, Miao et al. 2024): the distribution of a walk down the tree, and one sample of it.

The walk starts at the context. At every node it moves to one of the children or ends, where the next token is sampled. A rule
computes the probabilities of all moves without randomness; tests enumerate the same distribution that decoding samples from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.arguments import check_flag
from specheads.decoding.verification import Verification
from specheads.pair.sampling import accept_prob, at_least_float32, sample

# How the tokens of a tree were chosen.
IID = "a tree of i.i.d. samples"
DISTINCT = "a tree of samples without replacement"
CHOSEN = "a tree of chosen tokens"
BEAM = "the best beam"


@dataclass(frozen=True)
class Draft:
    """A proposal as a token tree; a chain is the tree without branches. A node's parent comes before it."""

    tokens: Tensor  # (N,) long
    parents: Tensor  # (N,) long, -1 = the context
    depth: Tensor  # (N,) long, 0 for a child of the context
    # (<=N + 1, V), row p + 1 the warped distribution that the children of node p were sampled from, row 0 that of the context's;
    # None where no token was sampled.
    draft_probs: Tensor | None
    order: Tensor  # (M,) long, the sampled nodes in sampling order; a node that was sampled twice occurs twice
    num_draft_calls: int  # draft forward passes spent on it
    copied: Tensor | None = None  # (N,) bool, of a graph: the nodes that were copied instead of drafted
    repeated: Tensor | None = None  # (N,) long, of a graph: the drafted node with the same last tokens, or the node itself
    replacement: bool = True  # whether a token may be sampled twice after the same node
    nan: bool = False  # whether the draft's logits were NaN; then the rest means nothing

    @property
    def num_drafted(self) -> int:
        """How many tokens the draft model proposed."""
        return len(self.tokens) if self.copied is None else int((~self.copied).sum())

    @classmethod
    def chain(cls, tokens: Tensor, draft_probs: Tensor | None, num_draft_calls: int) -> "Draft":
        """Return a draft without branches."""
        index = torch.arange(len(tokens), device=tokens.device)
        return cls(tokens, index - 1, index, draft_probs, index, num_draft_calls)


@dataclass(frozen=True)
class _TreeVerdict:
    """The decision of a verification rule for a tree."""

    num_accepted: Tensor  # (1,) long
    next_token: Tensor  # (1,) long, the target's token after the accepted ones
    accepted_nodes: Tensor  # (D,) long, from the context down, -1 after the last


@dataclass(frozen=True)
class TreeBlock:
    """A drafted tree of N nodes and both models' distributions along it; B is 1.

    Probabilities are float32 or wider, already warped. Of the tensors with N + 1 rows, row p + 1 belongs to the children of node
    p, row 0 to those of the context.
    """

    tokens: Tensor  # (N,) long
    depth: Tensor  # (N,) long, 0 for a child of the context
    parent_row: Tensor  # (N,) long, the row that each node and its siblings belong to
    samples: Tensor  # (N + 1, m) long, the nodes sampled there, in sampling order, -1 after the last
    ancestors: Tensor  # (N, N) bool, row i: node i and all its ancestors
    draft_probs: Tensor | None  # (N + 1, V), which the nodes were sampled from
    target_probs: Tensor  # (N + 1, V)
    crowded: Tensor  # (c,) long, the rows with several samples
    replacement: bool = True  # whether a token could be sampled twice after the same node

    @classmethod
    def of(cls, draft: Draft, target_probs: Tensor, shared: bool = False) -> "TreeBlock":
        """Return the block of a draft and the target's distributions (N + 1, V), on the device of these.

        Args:
            shared: replace the target's distribution after each node of a graph by that after the node that it repeats.

        Raises:
            ValueError: numbers of nodes that do not fit together.
        """
        count, device = len(draft.tokens), target_probs.device
        if len(target_probs) != count + 1:
            raise ValueError(f"{count} nodes need {count + 1} distributions of the target, but there are {len(target_probs)}")
        if shared and draft.repeated is not None:
            context = draft.repeated.new_zeros(1)
            target_probs = target_probs[torch.cat([context, draft.repeated + 1]).to(device)]
        parents, order = draft.parents.tolist(), draft.order.tolist()
        sampled: list[list[int]] = [[] for _ in range(count + 1)]
        for node in order:
            sampled[parents[node] + 1].append(node)
        most = max(map(len, sampled))
        table = torch.tensor([nodes + [-1] * (most - len(nodes)) for nodes in sampled], dtype=torch.long)
        draft_probs = draft.draft_probs
        if draft_probs is not None:
            draft_probs = at_least_float32(draft_probs.to(device))
            rows = count + 1 - len(draft_probs)
            draft_probs = torch.nn.functional.pad(draft_probs, (0, 0, 0, rows)) if rows else draft_probs
        crowded = torch.tensor([row for row, nodes in enumerate(sampled) if len(nodes) > 1], dtype=torch.long)
        return cls(
            tokens=draft.tokens.to(device),
            depth=draft.depth.to(device),
            parent_row=(draft.parents + 1).to(device),
            samples=table.to(device),
            ancestors=_lineage(parents).to(device),
            draft_probs=draft_probs,
            target_probs=at_least_float32(target_probs),
            crowded=crowded.to(device),
            replacement=draft.replacement,
        )

    @property
    def both_probs(self) -> tuple[Tensor, Tensor]:
        """The distributions of target and draft, (N + 1, V) each, of a tree whose nodes were sampled."""
        if self.draft_probs is None:
            raise ValueError("the nodes were chosen, not sampled, so there are no distributions of the draft")
        return self.target_probs, self.draft_probs

    @property
    def most_samples(self) -> int:
        """The most samples after any node."""
        return self.samples.shape[1]


def _lineage(parents: Sequence[int]) -> Tensor:
    """Return the ancestors of nodes: (N, N) bool, row i marks node i and all nodes above it.

    Args:
        parents: of each node, -1 for the context; a parent comes before its children.
    """
    ancestors = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    return torch.from_numpy(ancestors)


@dataclass(frozen=True)
class TreeDistribution:
    """The distribution of a verified tree's outcome."""

    moves: Tensor  # (N,) float64, the probability that the walk, once at a node's parent, moves on to the node
    rest: Tensor  # (N + 1, V), unnormalised: the next token's distribution where the walk ends; all 0: the target's
    block: TreeBlock

    def next_probs(self, row: Tensor) -> Tensor:
        """Return the unnormalised distribution of the next token (B, V) where the walk ends in `row` (B,)."""
        rest = self.rest[row]
        # Where two distributions differ by rounding alone a residual is empty, and the target's distribution is as close.
        return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, self.block.target_probs[row])

    def decide(self, uniforms: Tensor, next_uniform: Tensor) -> _TreeVerdict:
        """Return the verdict at given uniform numbers.

        Args:
            uniforms: (>=D,), for the move at each depth.
            next_uniform: (1,), for the next token.
        """
        block, count = self.block, len(self.moves)
        index = torch.arange(count, device=self.moves.device)
        earlier_sibling = (block.parent_row[:, None] == block.parent_row) & (index < index[:, None])
        before = earlier_sibling.double() @ self.moves
        uniform = uniforms[block.depth]
        chosen = (before <= uniform) & (uniform < before + self.moves)
        reached = ~(block.ancestors & ~chosen).any(dim=1)
        places = uniforms.new_full((len(uniforms) + 1,), -1, dtype=torch.long)
        path = places.scatter(0, torch.where(reached, block.depth, len(uniforms)), index)[:-1]
        num_accepted = reached.sum(dim=0, keepdim=True)
        row = torch.where(reached, block.depth + 1, 0)
        row = torch.where(num_accepted > 0, row.argmax(dim=0, keepdim=True) + 1, 0) if count else num_accepted
        next_token = sample(self.next_probs(row), next_uniform)
        return _TreeVerdict(num_accepted=num_accepted, next_token=next_token, accepted_nodes=path)


class TreeVerification(Verification):
    """The base of rules for trees, which verify each tree whatever happened before."""

    takes = frozenset({IID, DISTINCT, CHOSEN, BEAM})
    shared_logits: bool = False  # whether it verifies a graph's node by the distribution after the node that it repeats

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        """Return the distribution of the outcome."""
        raise NotImplementedError


class MultiRound(TreeVerification):
    """`verification=multi_round`: the tokens sampled at a node are tested one after the other.

    Each is tested against the target's residual after the earlier rejections, even if the same token was sampled before. Without
    replacement a token's distribution is the draft's without the tokens sampled before it, renormalised.

    Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyStochastic; without replacement as in Jeon et al. 2024 (RSD), section
    3.
    """

    name = "multi_round"
    compile_key = "multi round"
    label = "multi-round verification"
    takes = frozenset({IID, DISTINCT})

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        target, draft = block.both_probs
        moves = torch.zeros(len(block.tokens), dtype=torch.float64, device=target.device)
        # The probability that all samples so far were rejected.
        reach = torch.ones(len(target), dtype=torch.float64, device=target.device)
        for number in range(block.most_samples):
            there, node = block.samples[:, number] >= 0, block.samples[:, number].clamp_min(0)
            token = block.tokens[node][:, None]
            passes = accept_prob(target.gather(1, token), draft.gather(1, token)).squeeze(1).double()
            passes = torch.where(there, passes, 0.0)
            moves = moves.index_add(0, node, reach * passes)
            reach = reach * (1 - passes)
            residual = (target - draft).clamp_min(0)
            mass = residual.sum(dim=1, keepdim=True)
            target = torch.where(there[:, None] & (mass > 0), residual / mass.clamp_min(torch.finfo(mass.dtype).tiny), target)
            if not block.replacement:
                others = draft.scatter(1, token, 0.0)
                others = others / others.sum(dim=1, keepdim=True).clamp_min(torch.finfo(others.dtype).tiny)
                draft = torch.where(there[:, None], others, draft)
        return TreeDistribution(moves, target, block)


class TreeMatch(TreeVerification):
    """`verification=tree_match`: the target samples a token, and the walk continues at the child that has it.

    A move has the target's probability of the node's token. Lossless for every tree that was fixed before the target sampled,
    however its tokens were chosen.

    Args:
        shared_logits: verify a node of a graph by the target's distribution after the node that it repeats, instead of after its
            path: what a target that read the graph itself, without the copies, would do. The copies are read all the same, so
            this shows only what such a saving would cost. It is lossy, unless the target's next token depends on the last `tau`
            tokens alone: the total variation of three tokens is 0.11 (0.04 to 0.21) for random targets over three tokens.

    Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyGreedy. `shared_logits` has no source: the code of GSD (Gong et al.
    2024, github.com/gzhch/gsd) makes a tree of the graph before the target reads it.
    """

    name = "tree_match"

    def __init__(self, shared_logits: bool = False) -> None:
        check_flag("verification.shared_logits", shared_logits)
        self.shared_logits, self.lossless = shared_logits, not shared_logits
        self.compile_key = ("tree match", shared_logits)
        self.label = "tree matching, shared logits" if shared_logits else "tree matching"

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        rest, row, token = block.target_probs.clone(), block.parent_row, block.tokens
        moves = rest[row, token].double()
        index = torch.arange(len(token), device=token.device)
        repeats = (row[:, None] == row) & (token[:, None] == token) & (index < index[:, None])
        rest[row, token] = 0
        return TreeDistribution(torch.where(repeats.any(dim=1), 0.0, moves), rest, block)
