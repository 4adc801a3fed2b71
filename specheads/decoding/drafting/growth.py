"""Trees while they are drafted: their nodes on the host, the draft's memory of those that it has read, and what a rule says of each.

A tree grows level by level. What a level's tokens are is the drafter's choice (`propose`); that they go through the stopping rule,
each along its own path, is the same for all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.decoding.engine import Engine, ForwardOutput, TreeSlots
from specheads.decoding.records import Draft
from specheads.decoding.stopping import MAX_TOKENS, StoppingRule
from specheads.features import drafting_features
from specheads.sampling import Uniforms, Warp

ROOT = -1  # the parent of first nodes: the context


@dataclass
class Nodes:
    """A tree's nodes, in the order in which they were first drawn."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    _known: dict[tuple[int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def draw(self, parent: int, token: int, merge: bool = False) -> int:
        """Add a token behind `parent` and return its node; with `merge` that of an earlier draw of it there."""
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
        return (node for node, other in enumerate(self.parents) if other == parent)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the context down to `node`."""
        found = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def draft(self, draft_probs: Tensor | None = None, num_draft_calls: int = 0, **more: Any) -> Draft:
        """Return the tree as a Draft, on the host but for the laws."""
        columns = (torch.tensor(column, dtype=torch.long) for column in (self.tokens, self.parents, self.depth))
        return Draft(*columns, draft_probs, torch.tensor(self.order, dtype=torch.long), num_draft_calls, **more)


class Read:
    """Work that hands over what a forward gives; for trees, in a tail of `width` slots."""

    def __init__(self, width: int = 0) -> None:
        self.compile_key = ("read", width)

    def __call__(self, output: ForwardOutput) -> tuple[Tensor, Tensor]:
        return output.logits[0], output.hidden[0]


class TreeReader:
    """A model's memory of a tree: reads nodes behind the context, each seeing its own path, and forgets what was not accepted."""

    def __init__(self, engine: Engine, most_nodes: int, most_at_once: int, most_pending: int = 2) -> None:
        """Room for `most_nodes` nodes, up to `most_at_once` of them in a forward, behind up to `most_pending` tokens of context."""
        self.engine, self._most_at_once, self._most_pending = engine, most_at_once, most_pending
        device = engine.lm.device
        width = most_nodes + 1 + engine.padded(most_at_once)
        self._tree_slots = TreeSlots.empty(width, device)
        # Rows are written one by one, which numpy does ten times as fast.
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
        """Read the last committed token and all nodes behind it; return logits (1 + N, V) and hidden states (1 + N, H) after each."""
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
        """Keep what was read of the accepted nodes `path`, from the context down."""
        read = [self.slots[node] for node in path if node in self.slots]
        self.engine.keep(self.base, [0, *read])


def usual_length(rule: StoppingRule) -> int:
    """Return the length of paths to make room for: no less than what most rules need, for few sizes mean few units."""
    return max(rule.max_tokens, MAX_TOKENS)


@dataclass
class Frontier:
    """The nodes that a tree grows from, n of them, and what the draft and the rule say after each."""

    nodes: list[int]
    logits: Tensor  # (n, V)
    hidden: Tensor  # (n, H)
    states: Any  # of the stopping rule, (n, ...)


def step_rule(engine: Engine, rule: StoppingRule, frontier: Frontier, rows: Tensor, tokens: Tensor) -> tuple[Any, Tensor]:
    """Let the stopping rule see `tokens` (c,) drawn after the frontier's nodes `rows` (c,); return its states (c, ...) and stops (c,)."""
    hidden, logits = frontier.hidden[rows], frontier.logits
    features = drafting_features(rule.needs, logits[rows] if rule.needs else logits, tokens, hidden, engine.lm.embed)
    return rule.step(tree_map(lambda value: value[rows], frontier.states), features)


@dataclass(frozen=True)
class Drawn:
    """A token that was proposed behind the node `parent`, as the host knows it."""

    number: int  # among those of its level
    parent: int
    token: int
    prob: float  # under the law it was chosen by
    stop: bool  # whether the stopping rule or the token itself ends its path


@dataclass
class Grown:
    """A finished tree, and what the rule thought at each node."""

    nodes: Nodes
    states: dict[int, tuple[Any, int]]  # by node: a level's states (c, ...), and the row
    num_draft_calls: int = 0
    nan: bool = False  # whether the draft computed no numbers

    def state(self, node: int) -> Any:
        """Return the rule's state (1, ...) after a node."""
        states, row = self.states[node]
        return tree_map(lambda value: value[row : row + 1], states)

    def after(self, path: Sequence[int]) -> tuple[Any, int, int]:
        """Return what the rule is to learn from: its state (1, ...) at the end of a path, the path's length and how much of it was accepted.

        The path is the accepted one, as far as it was drafted, and goes on with first children.
        """
        known = [node for node in path if node in self.states]
        node, length = (known[-1] if known else ROOT), len(known)
        while (child := next(self.nodes.children(node), None)) is not None and child in self.states:
            node, length = child, length + 1
        return self.state(node), length, len(known)


class TreeDrafter:
    """Grows trees level by level, with one forward of the draft for each level and one wait for the device."""

    most_pending = 2  # committed tokens that the draft may not have read: its last leaf and the target's own

    def __init__(self, engine: Engine, warp: Warp, rule: StoppingRule, most_nodes: int, most_at_once: int) -> None:
        self.engine, self.rule, self.most_nodes = engine, rule, most_nodes
        # Greedy laws are point masses, by which nothing can be ranked.
        self.distribution = Warp() if warp.greedy else warp
        self.reader = TreeReader(engine, most_nodes, most_at_once, self.most_pending)

    def warm_up(self, ends: Tensor) -> None:
        """Prepare the engine for all that drafting runs."""
        self.reader.warm_up()

    def grow(self, committed: Sequence[int], state: Any, limit: int, draws: Uniforms, ends: Tensor) -> Grown:
        """Return a tree of at most `limit` levels behind the committed tokens."""
        grown, limit = Grown(Nodes(), {ROOT: (state, 0)}), min(limit, self.rule.max_tokens)
        self._grown = grown
        if limit < 1:
            self.reader.slots = {}
            return grown
        logits, hidden = self.reader.begin(committed[self.engine.length :])
        frontier, grown.num_draft_calls = Frontier([ROOT], logits, hidden, state), 1
        for depth in range(limit):
            rows, tokens, probs = self.propose(frontier, draws)
            states, stops = step_rule(self.engine, self.rule, frontier, rows, tokens)
            nan = frontier.logits.isnan().any().expand(len(rows))
            told = torch.stack(
                [rows, tokens, probs, stops | ends[tokens], nan]
            ).tolist()  # to the wider type, which holds them all
            grown.nan = any(told.pop())
            if grown.nan:
                break
            drawn = [
                Drawn(number, frontier.nodes[int(row)], int(token), prob, bool(stop))
                for number, (row, token, prob, stop) in enumerate(zip(*told, strict=True))
            ]
            admitted, onward = self.admit(grown.nodes, drawn)
            grown.states |= {node: (states, one.number) for node, one in admitted.items()}
            if not onward or depth + 1 == limit:
                break
            logits, hidden = self.reader.read(grown.nodes, onward)
            grown.num_draft_calls += 1
            kept = torch.tensor([admitted[node].number for node in onward], device=tokens.device)
            frontier = Frontier(onward, logits, hidden, tree_map(lambda value, kept=kept: value[kept], states))
        return grown

    def propose(self, frontier: Frontier, draws: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens that may follow the frontier: its rows (c,), the tokens (c,) and their probabilities (c,) in float64."""
        raise NotImplementedError

    def admit(self, nodes: Nodes, drawn: Sequence[Drawn]) -> tuple[dict[int, Drawn], list[int]]:
        """Add what was drawn to the tree; return the nodes that it gave, and those among them from which the tree goes on."""
        raise NotImplementedError

    def after(self, path: Sequence[int]) -> tuple[Any, int, int]:
        """Return what the rule is to learn from, after the nodes `path` of the last draft were accepted; see Grown."""
        return self._grown.after(path)

    def keep(self, path: Sequence[int]) -> None:
        """Forget what was drafted last, but for the accepted nodes `path`."""
        if self.reader.slots:
            self.reader.keep(path)
