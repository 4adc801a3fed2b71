"""The best of several beams: a chain that is likely as a whole under the draft, as joint verification assumes.

The beams of a level are the best continuations of those before it, or, as the authors of joint verification do, the best of some
that are sampled.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.arguments import check_count
from specheads.decoding.engine import Engine
from specheads.decoding.step_inputs import DraftMemory
from specheads.decoding.stopping import StoppingRule
from specheads.pair.sampling import Uniforms, Warp, sample_distinct
from specheads.papers.mjsd.joint import JointVerification
from specheads.papers.trees.distribution import BEAM, Draft
from specheads.papers.trees.growth import ROOT, Frontier, Nodes, Proposal, TreeDrafter, usual_length
from specheads.papers.trees.rounds import TreeDrafting


class Beam(TreeDrafting):
    """`drafting=beam`: the most likely chain that a beam search finds, as long as the stopping rule lets it grow.

    Args:
        num_beams: B.
        samples_per_beam: 0 searches: the B most likely continuations of all beams are the next beams. S samples: S * B different
            continuations are sampled, in turn, by their joint probabilities, and the B most likely of them are the next beams.
            `Beam(1, 1)` is ancestral sampling; 2 is the beam sampling of the authors, and of transformers but for the last token.
            Greedy decoding searches.

    Source: Qin et al. 2024 (multi-token joint speculative decoding), section 4, with its number of beams. Their code
    (github.com/ZongyueQin/MJSD) samples 2 per beam, and differs in two points: it starts from B copies of the context, so that a
    first token can be sampled several times, and its draft probability is the share of all beams' continuations.
    """

    kind = BEAM

    def __init__(self, num_beams: int = 8, samples_per_beam: int = 0) -> None:
        check_count("drafting.num_beams", num_beams, least=1)
        check_count("drafting.samples_per_beam", samples_per_beam)
        self.num_beams, self.samples_per_beam = num_beams, samples_per_beam

    def most_read(self, max_tokens: int) -> int:
        return self.num_beams * max_tokens

    def most_verified(self, max_tokens: int) -> int:
        return 0  # a chain ends within the window

    def usual_verification(self) -> JointVerification:
        return JointVerification()

    def drafter(self, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> "_BeamDrafter":
        """Return the drafter for these choices, which writes into `memory`."""
        return _BeamDrafter(self, engine, warp, rule, memory)


class _BeamDrafter(TreeDrafter):
    """Searches with beams and returns the best one, with the distributions along it."""

    def __init__(self, choices: Beam, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> None:
        most = choices.most_read(usual_length(rule))
        super().__init__(engine, warp, rule, most, choices.num_beams)
        self.num_beams, self._memory, self._probs = choices.num_beams, memory, memory.distributions(most + 1)
        self._num_samples = 0 if warp.greedy else choices.samples_per_beam * choices.num_beams

    def draft(self, committed: Sequence[int], state: Any, limit: int, uniforms: Uniforms, ends: Tensor) -> Draft:
        """Return the best beam after the committed tokens, at most `limit` long."""
        self._joint, self._best = {ROOT: 0.0}, ROOT
        self._ended: dict[int, float] = {}
        grown = self.grow(committed, state, limit, uniforms, ends)
        self._path = grown.nodes.path(self._best)
        for index, node in enumerate(self._path):
            token = torch.tensor([grown.nodes.tokens[node]], device=self._probs.device)
            self._memory.write(self._memory.indices[index], token, self._probs[grown.nodes.parents[node] + 1][None])
        tokens = torch.tensor([grown.nodes.tokens[node] for node in self._path], dtype=torch.long)
        return replace(Draft.chain(tokens, self._memory.probs[0, : len(tokens)], grown.num_draft_calls), nan=grown.nan)

    def propose(self, frontier: Frontier, uniforms: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        probs, device = self.distribution(frontier.logits), frontier.logits.device
        self._probs[torch.tensor(frontier.nodes, device=device) + 1] = probs
        before = torch.tensor([self._joint[node] for node in frontier.nodes], dtype=torch.float64, device=device)
        joint = (before[:, None] + probs.double().log()).flatten()
        among, scores = self._next_beams(joint, uniforms)
        rows, tokens = among // probs.shape[1], among % probs.shape[1]
        return rows, tokens, probs[rows, tokens].double().masked_fill(scores == -torch.inf, 0.0)

    def _next_beams(self, joint: Tensor, uniforms: Uniforms) -> tuple[Tensor, Tensor]:
        """Return which continuations are the next beams (b,), and their joint log-probabilities (b,): -inf for none.

        Args:
            joint: (c,), of all continuations.
        """
        if not self._num_samples:
            top = joint.topk(min(self.num_beams, len(joint)))
            return top.indices, top.values
        weights = (joint - joint.max()).exp()  # the largest is 1, however unlikely the beams are
        among, entries = sample_distinct(weights, uniforms.take(self._num_samples))
        top = joint[among].masked_fill(entries == 0, -torch.inf).topk(self.num_beams)
        return among[top.indices], top.values

    def admit(self, nodes: Nodes, proposals: Sequence[Proposal]) -> tuple[dict[int, Proposal], list[int]]:
        """Keep the best beams; one that has ended still competes, and the search is over once it is the best."""
        admitted = {}
        for proposal in proposals:
            if proposal.prob > 0:
                node = nodes.add(proposal.parent, proposal.token)
                admitted[node], self._joint[node] = proposal, self._joint[proposal.parent] + log(proposal.prob)
                self._ended |= {node: self._joint[node]} if proposal.stop else {}
        running = {node: self._joint[node] for node in admitted} | self._ended
        best = sorted(running, key=lambda node: (-running[node], node))[: self.num_beams]
        self._best = best[0]
        if self._best in self._ended:
            return admitted, []
        return admitted, sorted(node for node in best if node not in self._ended)

    def after(self, path: Sequence[int]) -> tuple[Any, int, int]:
        """Return the stopping rule's state along the best beam, its length and the number of accepted tokens."""
        return self._grown.state(self._best), len(self._path), len(path)

    def keep(self, path: Sequence[int]) -> None:
        super().keep(self._path[: len(path)])
