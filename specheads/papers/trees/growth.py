"""Growing trees: their nodes on the host, the draft's KV memory of them, and the stopping rule's state at each.

A tree grows level by level. A drafter chooses the tokens of a level (`propose`); the rest is common to all drafters: the stopping
rule sees every token along its path.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.decoding.engine import Engine, ForwardOutput, TreeSlots
from specheads.decoding.stopping import MAX_TOKENS, StoppingRule
from specheads.heads.features import drafting_features
from specheads.pair.sampling import Uniforms, Warp
from specheads.papers.trees.verification import Draft

ROOT = -1  # the parent of first nodes: the context


@dataclass
class Nodes:
    """A tree's nodes, in the order in which they were added."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    _known: dict[tuple[int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, merge: bool = False) -> int:
        """Add a child of `parent` and return its node; with `merge`, the node of the same token there if there is one."""
        node = self._known.get((parent, token)) if merge else None
        if node is None:
            node = len(self)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depth.append(0 if parent == ROOT else self.depth[parent] + 1)
            self._known[parent, token] = node
        self.order.append(node)
        return node

    def children(self, parent: int) -> Iterator[int]:
        """Yield the nodes below `parent`."""
        return (node for node, other in enumerate(self.parents) if other == parent)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the context down to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def draft(self, draft_probs: Tensor | None = None, num_draft_calls: int = 0, **more: Any) -> Draft:
        """Return the tree as a Draft, on the host except for the distributions."""

        def column(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.long)

        tree = column(self.tokens), column(self.parents), column(self.depth)
        return Draft(*tree, draft_probs, column(self.order), num_draft_calls, **more)


class Read:
    """The epilogue that returns logits and hidden states; for trees in `width` slots."""

    def __init__(self, width: int = 0) -> None:
        self.compile_key = ("read", width)

    def __call__(self, output: ForwardOutput) -> tuple[Tensor, Tensor]:
        return output.logits[0], output.hidden[0]


class TreeReader:
    """A model's KV memory of a tree: reads nodes, each attending to its path, and forgets those that were not accepted."""

    def __init__(self, engine: Engine, most_nodes: int, most_at_once: int, most_pending: int = 2) -> None:
        """Prepare for trees of `most_nodes` nodes.

        Args:
            most_at_once: nodes that a forward pass reads.
            most_pending: tokens of context that come before the tree.
        """
        self.engine, self._most_at_once, self._most_pending = engine, most_at_once, most_pending
        device = engine.lm.device
        width = most_nodes + 1 + engine.padded(most_at_once)
        self._tree_slots = TreeSlots.empty(width, device)
        # Rows are written one by one, which is ten times as fast in numpy.
        self._seen, self._depth = np.eye(width, dtype=bool), np.zeros(width, dtype=np.int64)
        self._seen_tensor, self._depth_tensor = torch.from_numpy(self._seen), torch.from_numpy(self._depth)
        self._context = engine.compiled_step(Read())
        self._nodes = engine.compiled_step(Read(width), all_logits=True, tree=True)

    def warm_up(self) -> None:
        """Prepare the engine for all that reading runs."""
        self.engine.warm_up(self._context, range(1, self._most_pending + 1))
        self.warm_up_nodes()

    def warm_up_nodes(self) -> None:
        """Prepare the engine for reading nodes alone."""
        counts = sorted({self.engine.padded(count) for count in range(1, self._most_at_once + 1)})
        self.engine.warm_up(self._nodes, counts, self._tree_slots)

    def begin(self, pending: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read committed tokens; return logits (1, V) and hidden states (1, H) after them, the context of a new tree."""
        logits, hidden = self._context(torch.tensor([pending], device=self.engine.lm.device))
        self.base, self.slots = self.engine.length - 1, {ROOT: 0}
        self._tree_slots.base.fill_(self.base)
        return logits, hidden[-1:]

    def read_whole(self, nodes: Nodes, last: int) -> tuple[Tensor, Tensor]:
        """Read the last committed token and all nodes; return logits (1 + N, V) and hidden states (1 + N, H) after each."""
        self.base, self.slots = self.engine.length, {ROOT: 0}
        self._tree_slots.base.fill_(self.base)
        return self._read(nodes, range(len(nodes)), [last])

    def read(self, nodes: Nodes, new: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read the nodes `new`, whose parents were read; return logits (n, V) and hidden states (n, H) after each."""
        return self._read(nodes, new, [])

    def _read(self, nodes: Nodes, new: Sequence[int], before: list[int]) -> tuple[Tensor, Tensor]:
        for node in new:
            slot = self.slots[node] = len(self.slots)
            self._depth[slot] = nodes.depth[node] + 1
            self._seen[slot] = self._seen[self.slots[nodes.parents[node]]]
            self._seen[slot, slot] = True
        self._tree_slots.depth.copy_(self._depth_tensor)
        self._tree_slots.seen.copy_(self._seen_tensor)
        tokens = before + [nodes.tokens[node] for node in new]
        count = len(tokens)
        tokens += [0] * (self.engine.padded(count) - count)
        logits, hidden = self._nodes(torch.tensor([tokens], device=self.engine.lm.device), self._tree_slots)
        self.engine.rewind(self.base + len(self.slots))
        return logits[:count], hidden[:count]

    def keep(self, path: Sequence[int]) -> None:
        """Keep the accepted nodes `path`, from the context down, as far as they were read."""
        read = [self.slots[node] for node in path if node in self.slots]
        self.engine.keep(self.base, [0, *read])


def usual_length(rule: StoppingRule) -> int:
    """Return the path length to allocate for: at least what most rules need, because few sizes mean few compiled steps."""
    return max(rule.max_tokens, MAX_TOKENS)


@dataclass
class Frontier:
    """The n nodes that a tree grows from, with the draft's outputs and the stopping rule's states after each."""

    nodes: list[int]
    logits: Tensor  # (n, V)
    hidden: Tensor  # (n, H)
    states: Any  # of the stopping rule, (n, ...)


def _step_rule(engine: Engine, rule: StoppingRule, frontier: Frontier, rows: Tensor, tokens: Tensor) -> tuple[Any, Tensor]:
    """Step the stopping rule over `tokens` (c,) after the frontier's nodes `rows` (c,).

    Return its states (c, ...) and stops (c,).
    """
    hidden, logits = frontier.hidden[rows], frontier.logits
    features = drafting_features(rule.needs, logits[rows] if rule.needs else logits, tokens, hidden, engine.lm.embed)
    return rule.step(tree_map(lambda value: value[rows], frontier.states), features)


@dataclass(frozen=True)
class Proposal:
    """A token that was proposed as a child of the node `parent`, on the host."""

    number: int  # among those of its level
    parent: int
    token: int
    prob: float  # under the distribution it was chosen by
    stop: bool  # whether the stopping rule or the token itself ends its path


@dataclass
class Grown:
    """A finished tree, and the stopping rule's state at each node."""

    nodes: Nodes
    states: dict[int, tuple[Any, int]]  # by node: a level's states (c, ...), and the row
    num_draft_calls: int = 0
    nan: bool = False  # whether the draft's logits were NaN or infinite

    def state(self, node: int) -> Any:
        """Return the rule's state (1, ...) after a node."""
        states, row = self.states[node]
        return tree_map(lambda value: value[row : row + 1], states)

    def after(self, path: Sequence[int]) -> tuple[Any, int, int]:
        """Return the rule's state (1, ...) at the end of a path, the path's length and how many of its tokens were accepted.

        The path is the accepted one, as far as it was drafted, and continues with first children.
        """
        drafted = [node for node in path if node in self.states]
        node, length = (drafted[-1] if drafted else ROOT), len(drafted)
        while (child := next(self.nodes.children(node), None)) is not None and child in self.states:
            node, length = child, length + 1
        return self.state(node), length, len(drafted)


class TreeDrafter:
    """Grows trees level by level, with one forward pass of the draft and one wait for the device per level."""

    most_pending = 2  # committed tokens that the draft may not have read: its last leaf and the target's token

    def __init__(self, engine: Engine, warp: Warp, rule: StoppingRule, most_nodes: int, most_at_once: int) -> None:
        self.engine, self.rule = engine, rule
        # Greedy distributions are point masses, by which nothing can be ranked.
        self.distribution = Warp() if warp.greedy else warp
        self.reader = TreeReader(engine, most_nodes, most_at_once, self.most_pending)

    def warm_up(self, ends: Tensor) -> None:
        """Prepare the engine for all that drafting runs."""
        self.reader.warm_up()

    def grow(self, committed: Sequence[int], state: Any, limit: int, uniforms: Uniforms, ends: Tensor) -> Grown:
        """Return a tree of at most `limit` levels after the committed tokens."""
        grown, limit = Grown(Nodes(), {ROOT: (state, 0)}), min(limit, self.rule.max_tokens)
        self._grown = grown
        if limit < 1:
            self.reader.slots = {}
            return grown
        logits, hidden = self.reader.begin(committed[self.engine.length :])
        frontier, grown.num_draft_calls = Frontier([ROOT], logits, hidden, state), 1
        for depth in range(limit):
            rows, tokens, probs = self.propose(frontier, uniforms)
            states, stops = _step_rule(self.engine, self.rule, frontier, rows, tokens)
            nan = (~(frontier.logits < torch.inf)).any().expand(len(rows))  # NaN, or infinite
            # One transfer to the host, in float64, which represents them all.
            columns = torch.stack([rows, tokens, probs, stops | ends[tokens], nan]).tolist()
            grown.nan = any(columns.pop())
            if grown.nan:
                break
            proposals = [
                Proposal(number, frontier.nodes[int(row)], int(token), prob, bool(stop))
                for number, (row, token, prob, stop) in enumerate(zip(*columns, strict=True))
            ]
            admitted, onward = self.admit(grown.nodes, proposals)
            grown.states |= {node: (states, proposal.number) for node, proposal in admitted.items()}
            if not onward or depth + 1 == limit:
                break
            logits, hidden = self.reader.read(grown.nodes, onward)
            grown.num_draft_calls += 1
            kept = torch.tensor([admitted[node].number for node in onward], device=tokens.device)
            frontier = Frontier(onward, logits, hidden, tree_map(lambda value, kept=kept: value[kept], states))
        return grown

    def propose(self, frontier: Frontier, uniforms: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens that may follow the frontier: its rows (c,), the tokens (c,) and their probabilities (c,) in float64."""
        raise NotImplementedError

    def admit(self, nodes: Nodes, proposals: Sequence[Proposal]) -> tuple[dict[int, Proposal], list[int]]:
        """Add proposals to the tree; return the proposals by their nodes, and the nodes from which the tree grows on."""
        raise NotImplementedError

    def after(self, path: Sequence[int]) -> tuple[Any, int, int]:
        """Return the stopping rule's state and the numbers of drafted and accepted tokens, after `path` was accepted."""
        return self._grown.after(path)

    def keep(self, path: Sequence[int]) -> None:
        """Forget the last draft except for the accepted nodes `path`."""
        if self.reader.slots:
            self.reader.keep(path)
