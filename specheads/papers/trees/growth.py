"""Rounds of methods that draft trees, one row at a time: growing them level by level, and verifying
them in one forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.decoding.drafting import Drafting
from specheads.decoding.engine import Engine, ForwardOutput, TreeSlots
from specheads.decoding.records import Clock, Mark, Round
from specheads.decoding.request import Request
from specheads.decoding.rounds import RoundParts, Rounds
from specheads.decoding.stopping import MAX_TOKENS, StoppingRule
from specheads.decoding.stopping.rule import State
from specheads.decoding.verification import Verification
from specheads.errors import UserError
from specheads.heads.features import drafting_features
from specheads.pair.sampling import Uniforms, Warp, has_nan
from specheads.papers.trees.verification import ROOT, Draft, TreeBlock, TreeMatch


class _Read:
    compile_key = "read"

    def __call__(self, output: ForwardOutput) -> tuple[Tensor, Tensor]:
        return output.logits[0], output.hidden[0]


class TreeReader:
    """A model's KV cache of a tree: reads nodes, each attending to its path, and forgets those
    that were not accepted.
    """

    def __init__(self, engine: Engine, most_nodes: int, most_pending: int = 0) -> None:
        """Prepare for trees of `most_nodes` nodes, and for contexts of `most_pending` tokens that
        are read alone.
        """
        self.engine = engine
        self._most_pending = most_pending
        # Rows are written one by one, which is ten times as fast in numpy.
        self._seen = np.eye(most_nodes + 1, dtype=bool)
        self._depth = np.zeros(most_nodes + 1, dtype=np.int64)
        self._context = engine.compiled_step(_Read())

    def warm_up(self) -> None:
        """Prepare the engine for reading contexts; nodes are read eagerly."""
        self.engine.warm_up(self._context, range(1, self._most_pending + 1))

    def begin(self, pending: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read committed tokens.

        Return logits (1, V) and hidden states (1, H) after them, the context of a new tree.
        """
        logits, hidden = self._context(torch.tensor([pending], device=self.engine.lm.device))
        self._begin_at(self.engine.length - 1)
        return logits, hidden[-1:]

    def _begin_at(self, base: int) -> None:
        self._base = base
        self._slots = {ROOT: 0}

    def read(
        self, tree: Draft, new: Sequence[int], before: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Read nodes `new`, whose parents were read; return logits (n, V) and hidden states (n, H).

        Committed tokens `before` are the context of a new tree, and are read with its nodes.
        """
        if before:
            self._begin_at(self.engine.length)
        for node in new:
            slot = self._slots[node] = len(self._slots)
            self._depth[slot] = tree.depth[node] + 1
            self._seen[slot] = self._seen[self._slots[tree.parents[node]]]
            self._seen[slot, slot] = True
        device = self.engine.lm.device
        tokens = [*before, *(tree.tokens[node] for node in new)]
        slots = TreeSlots(
            self._base,
            torch.from_numpy(self._depth).to(device),
            torch.from_numpy(self._seen).to(device),
        )
        output = self.engine.forward(
            torch.tensor([tokens], device=device), tree_slots=slots, num_logits=len(tokens)
        )
        return output.logits[0], output.hidden[0]

    def keep(self, path: Sequence[int]) -> None:
        """Keep the accepted nodes `path`, from the context down, as far as they were read."""
        self.engine.keep(
            self._base, [0, *(self._slots[node] for node in path if node in self._slots)]
        )


def usual_length(rule: StoppingRule) -> int:
    """Return the path length to allocate for: at least what most rules need, because few sizes mean
    few compiled steps.
    """
    return max(rule.max_tokens, MAX_TOKENS)


@dataclass
class Frontier:
    """The n nodes that a tree grows from, with the draft's outputs and the stopping rule's states
    after each.
    """

    nodes: list[int]
    logits: Tensor  # (n, V)
    hidden: Tensor  # (n, H)
    states: State  # the stopping rule's, (n, ...)


@dataclass(frozen=True)
class Proposal:
    """A token that was proposed as a child of the node `parent`, on the host."""

    number: int  # among those of its level
    parent: int
    token: int
    prob: float  # its probability where it was chosen
    stop: bool  # whether the stopping rule or the token itself ends its path


class RowDrafter:
    """The base of what drafts trees for one row, round by round."""

    def warm_up(self) -> None:
        """Prepare the engine for all that drafting runs."""

    def draft(
        self, committed: Sequence[int], state: State, limit: int, uniforms: Uniforms, ends: Tensor
    ) -> Draft:
        """Return a draft after the committed tokens.

        The draft model has not read the last of them, and maybe more.

        `state` is the stopping rule's, B = 1, `limit` the longest useful path; `ends` (V,) bool are
        the tokens that end a path.
        """
        raise NotImplementedError

    def after(self, path: Sequence[int]) -> tuple[State, int, int]:
        """Return the stopping rule's state along the path of the last draft that begins with the
        accepted nodes `path`.

        With it the numbers of that path's tokens, and of accepted ones.
        """
        raise NotImplementedError

    def keep(self, path: Sequence[int]) -> None:
        """Forget the last draft except for the accepted nodes `path`."""


class TreeDrafter(RowDrafter):
    """Grows trees level by level, with one forward pass of the draft and one wait for the device
    per level.

    A drafter chooses the tokens of a level (`propose`, `admit`); the rest is common to all: the
    stopping rule sees every token along its path.
    """

    most_pending = (
        2  # committed tokens that the draft may not have read: its last leaf and the target's token
    )

    def __init__(self, parts: RoundParts, most_nodes: int) -> None:
        self.engine = parts.engines.draft
        self.rule = parts.stopping
        # Greedy distributions are point masses, by which nothing can be ranked.
        self.distribution = Warp() if parts.warp.greedy else parts.warp
        self._reader = TreeReader(self.engine, most_nodes, self.most_pending)

    def warm_up(self) -> None:
        self._reader.warm_up()

    def draft(
        self, committed: Sequence[int], state: State, limit: int, uniforms: Uniforms, ends: Tensor
    ) -> Draft:
        limit = min(limit, self.rule.max_tokens)
        self.tree = Draft()
        self._was_read = limit >= 1
        # Each node's level with its states (c, ...), and its row
        self._states: dict[int, tuple[State, int]] = {ROOT: (state, 0)}
        self.begin(committed, limit)
        if self._was_read:
            self._grow(committed[self.engine.length :], state, limit, uniforms, ends)
        return self.finish()

    def _grow(
        self, pending: Sequence[int], state: State, limit: int, uniforms: Uniforms, ends: Tensor
    ) -> None:
        """Grow the tree to at most `limit` levels after the committed tokens, of which `pending`
        are not read yet.
        """
        tree = self.tree
        frontier = Frontier([ROOT], *self._reader.begin(pending), state)
        tree.num_draft_calls = 1
        for depth in range(limit):
            rows, tokens, probs = self.propose(frontier, uniforms)
            logits = frontier.logits
            before = tree_map(lambda value, rows=rows: value[rows], frontier.states)
            of_tokens = logits[rows] if self.rule.needs else logits
            lm = self.engine.lm
            hidden = frontier.hidden[rows]
            features = drafting_features(
                self.rule.needs, of_tokens, tokens, hidden, lm.embed, lm.kept_tokens
            )
            states, stops = self.rule.step(before, features)
            nan = (~(logits < torch.inf)).any().expand(len(rows))  # NaN, or infinite
            # One transfer to the host, in float64, which represents them all.
            columns = torch.stack([rows, tokens, probs, stops | ends[tokens], nan]).tolist()
            if any(columns.pop()):
                tree.nan = True
                return
            proposals = [
                Proposal(number, frontier.nodes[int(row)], int(token), prob, bool(stop))
                for number, (row, token, prob, stop) in enumerate(zip(*columns, strict=True))
            ]
            admitted, onward = self.admit(proposals)
            self._states |= {node: (states, proposal.number) for node, proposal in admitted.items()}
            if not onward or depth + 1 == limit:
                return
            kept = torch.tensor([admitted[node].number for node in onward], device=tokens.device)
            frontier = Frontier(
                onward,
                *self._reader.read(tree, onward),
                tree_map(lambda value, kept=kept: value[kept], states),
            )
            tree.num_draft_calls += 1

    def begin(self, committed: Sequence[int], limit: int) -> None:
        """Prepare for another tree, of at most `limit` levels."""

    def propose(self, frontier: Frontier, uniforms: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens that may follow the frontier: its rows (c,), the tokens (c,) and their
        probabilities (c,) in float64.
        """
        raise NotImplementedError

    def admit(self, proposals: Sequence[Proposal]) -> tuple[dict[int, Proposal], list[int]]:
        """Add proposals to the tree.

        Return the proposals by their nodes, and the nodes from which the tree grows on.
        """
        raise NotImplementedError

    def finish(self) -> Draft:
        """Return what is verified of the grown tree."""
        return self.tree

    def state_after(self, node: int) -> State:
        """Return the stopping rule's state (1, ...) after a node."""
        states, row = self._states[node]
        return tree_map(lambda value: value[row : row + 1], states)

    def after(self, path: Sequence[int]) -> tuple[State, int, int]:
        """Return them for the accepted nodes as far as they were drafted, and then first
        children.
        """
        drafted = [node for node in path if node in self._states]
        node = drafted[-1] if drafted else ROOT
        length = len(drafted)
        for child in range(node + 1, len(self.tree)):
            if self.tree.parents[child] == node and child in self._states:
                node = child
                length = length + 1
        return self.state_after(node), length, len(drafted)

    def keep(self, path: Sequence[int]) -> None:
        if self._was_read:
            self._reader.keep(path)


class TreeDrafting(Drafting):
    """The base of methods whose drafts have several candidates, or are chosen among several."""

    def usual_verification(self) -> Verification:
        return TreeMatch()

    def most_verified(self, max_tokens: int) -> int:
        return self.most_read(max_tokens) or max_tokens

    def drafter(self, parts: RoundParts) -> RowDrafter:
        """Return the drafter of rounds, which runs the last of their engines.

        A chain is written into their memory.
        """
        raise NotImplementedError

    def check_rows(self, parts: RoundParts) -> None:
        """Raise UserError for engines with memory of several texts."""
        if parts.engines.target.num_rows > 1:
            raise UserError(
                f"{type(self).__name__} with {type(parts.verification).__name__} decodes one prompt"
                " at a time; batches need chains, for example drafting=autoregressive and"
                " verification=token."
            )

    def rounds(self, parts: RoundParts) -> Rounds:
        self.check_rows(parts)
        most = parts.stopping.max_tokens
        return _TreeRounds(parts, self.drafter(parts), max(self.most_verified(most), most))


class _TreeRounds(Rounds):
    """Rounds of one row: a drafter grows a tree, and one forward pass of the target reads its last
    token and all nodes.
    """

    def __init__(self, parts: RoundParts, drafter: RowDrafter, most_nodes: int) -> None:
        super().__init__(parts.engines)
        self.drafter = drafter
        self.stopping = parts.stopping
        self.warp = parts.warp
        self._pair = parts.pair
        self._distribution = parts.verification.distribution
        self._reader = TreeReader(parts.engines.target, most_nodes)

    def warm_up(self, ends: Tensor) -> None:
        self.drafter.warm_up()

    def start(self, rows: Sequence[Request]) -> None:
        self.state = self.stopping.start_prompt(1, self.engines.draft.lm.device)

    def take(self, rows: Sequence[Request], ends: Tensor, clock: Clock) -> tuple[list[Round], Mark]:
        (row,) = rows
        self.state = self.stopping.start_round(self.state)
        draft = self.drafter.draft(
            row.committed, self.state, row.most_drafted, row.draft_uniforms, ends
        )
        drafted = clock.mark()
        if draft.nan:
            row.fail_by_nan(self._pair.draft_id)
            return [Round([])], drafted
        path, next_token = self._verify(row, draft)
        state, *counts = self.drafter.after(path)
        device = self.engines.draft.lm.device
        num_drafted, num_accepted = torch.tensor(counts, device=device)[:, None]
        self.state = self.stopping.end_round(state, num_drafted, num_accepted)
        self.drafter.keep(path)
        num_copied = sum(node >= draft.num_drafted for node in path)
        done = Round(
            tokens=[*(draft.tokens[node] for node in path), next_token],
            num_drafted=draft.num_drafted,
            num_accepted=len(path),
            num_discarded=draft.num_drafted - (len(path) - num_copied),
            num_draft_calls=draft.num_draft_calls,
        )
        return [done], drafted

    def _verify(self, row: Request, draft: Draft) -> tuple[Sequence[int], int]:
        """Verify a draft, and keep the accepted part in memory.

        Return the accepted nodes, from the context down, and the target's token.
        """
        block = TreeBlock.of(
            draft, self.warp(self._reader.read(draft, range(len(draft)), row.committed[-1:])[0])
        )
        numbers = row.verify_uniforms.take(self.stopping.max_tokens + 1)
        nodes, token = self._distribution(block).decide(numbers[:-1], numbers[-1:])
        nans = [has_nan(block.target_probs).any(), torch.zeros_like(token, dtype=torch.bool)[0]]
        if block.draft_probs is not None:
            # Other rows are left over from an earlier draft
            sampled = (block.samples >= 0).any(dim=1)
            nans[1] = (has_nan(block.draft_probs) & sampled).any()
        next_token, target_nan, draft_nan, *path = torch.cat(
            [token, torch.stack(nans).long(), nodes]
        ).tolist()
        path = [node for node in path if node >= 0]
        self._reader.keep(path)
        if draft_nan or target_nan:
            row.fail_by_nan(self._pair.draft_id if draft_nan else self._pair.target_id)
        return path, next_token
