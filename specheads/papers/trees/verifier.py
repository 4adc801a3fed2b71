"""The base of rules for trees, and the target's forward pass over a tree before such a rule decides."""

from typing import Any

import torch

from specheads.decoding.engine import Engine
from specheads.decoding.records import Draft
from specheads.decoding.verification import Verification
from specheads.decoding.verifier import Outcome
from specheads.papers.trees.distribution import TreeBlock, TreeDistribution
from specheads.papers.trees.growth import Nodes, TreeReader
from specheads.sampling import Uniforms, Warp, has_nan

# How the tokens of a tree were chosen.
IID = "a tree of i.i.d. samples"
DISTINCT = "a tree of samples without replacement"
CHOSEN = "a tree of chosen tokens"
BEAM = "the best beam"


class TreeVerification(Verification):
    """The base of rules for trees, which verify each tree whatever happened before."""

    takes = frozenset({IID, DISTINCT, CHOSEN, BEAM})
    shared_logits: bool = False  # whether it verifies a graph's node by the distribution after the node that it repeats

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        """Return the distribution of the outcome."""
        raise NotImplementedError

    def verifier(self, engine: Engine, warp: Warp, most_nodes: int, deepest: int) -> "TreeVerifier":
        return TreeVerifier(engine, warp, self, most_nodes, deepest)


class TreeVerifier:
    """Verifies trees: one forward pass over the last committed token and all nodes, then the rule."""

    def __init__(self, engine: Engine, warp: Warp, rule: TreeVerification, most_nodes: int, deepest: int) -> None:
        """`most_nodes`, `deepest`: of the largest draft."""
        self.engine, self.warp, self.rule, self._deepest = engine, warp, rule, deepest
        self.reader = TreeReader(engine, most_nodes, most_nodes + 1)

    def warm_up(self) -> None:
        self.reader.warm_up_nodes()

    def start_prompt(self) -> tuple[()]:
        return ()

    def verify(self, last: int, draft: Draft, planned: int, uniforms: Uniforms, state: Any) -> tuple[Outcome, Any]:
        nodes = Nodes(draft.tokens.tolist(), draft.parents.tolist(), draft.depth.tolist())
        logits, hidden = self.reader.read_whole(nodes, last)
        block = TreeBlock.of(draft, self.warp(logits), self.rule.shared_logits)
        numbers = uniforms.take(self._deepest + 1)
        verdict = self.rule.distribution(block).decide(numbers[:-1], numbers[-1:])
        nans = [has_nan(block.target_probs).any(), torch.zeros_like(verdict.next_token, dtype=torch.bool)[0]]
        if block.draft_probs is not None:
            sampled = (block.samples >= 0).any(dim=1)  # other rows are left over from an earlier draft
            nans[1] = (has_nan(block.draft_probs) & sampled).any()
        packed = torch.cat([verdict.next_token, torch.stack(nans).long(), verdict.accepted_nodes]).tolist()
        next_token, target_nan, draft_nan, *path = packed
        path = [node for node in path if node >= 0]
        self.reader.keep(path)
        ended = path[-1] + 1 if path else 0
        tokens = [nodes.tokens[node] for node in path]
        return Outcome(path, tokens, next_token, 0, hidden[None], ended, bool(draft_nan), bool(target_nan)), state
