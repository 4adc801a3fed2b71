"""MJSD (Qin et al. 2024, multi-token joint speculative decoding): tokens are chosen, and verified,
by joint probabilities.

The draft is the best of several beams. Joint verification is lossy by design: a likely token may
make up for an unlikely one before it, and the output is more likely than samples are.
`BlockSearch`, which it approximates, searches with the target alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from specheads.decoding.batching import BatchDecoder
from specheads.decoding.decoder import Decoder
from specheads.decoding.engine import Engine, make_engine
from specheads.decoding.records import CHAIN, Clock, Mark, Round
from specheads.decoding.request import Request, checked_window
from specheads.decoding.rounds import ChainRounds, Drafter, RoundParts, Rounds
from specheads.decoding.step_inputs import DraftMemory
from specheads.decoding.stopping import FixedLength
from specheads.decoding.stopping.rule import State
from specheads.decoding.verification import AcceptanceDistribution, Block, VerificationRule
from specheads.errors import UserError
from specheads.pair.pair import Pair
from specheads.pair.sampling import Uniforms, Warp
from specheads.papers.trees.growth import (
    Frontier,
    Proposal,
    TreeDrafter,
    TreeDrafting,
    usual_length,
)
from specheads.papers.trees.verification import BEAM, ROOT, Draft, TreeVerification
from specheads.settings import PositiveCount, Probability, argument, check


@dataclass(eq=False)
class JointVerification(VerificationRule):
    """`verification=joint`: the longest prefix of a chain is accepted whose `min(1, T / D)` exceeds
    `threshold`.

    T and D are the joint probabilities of its tokens under target and draft; a longer prefix may
    pass although a shorter one failed. The threshold is tau of the paper: at 0 all is accepted that
    the target finds possible, at 1 nothing.

    Source: Qin et al. 2024, algorithm 1.
    """

    name = "joint"
    lossless = False
    takes = frozenset({BEAM, CHAIN})
    threshold: Probability = argument(0.1, "what the joint ratio must exceed, for example 0.1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compile_key = ("joint", self.threshold)
        self.label = f"joint verification, threshold {self.threshold:g}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        ratio = block.log_ratios().cumsum(dim=1).exp().clamp_max(1.0)
        passes = ((ratio > self.threshold) & block.within).double()
        return AcceptanceDistribution(
            survival=passes.flip(1).cummax(dim=1).values.flip(1), weights=None, block=block
        )


@dataclass(eq=False)
class Beam(TreeDrafting):
    """`drafting=beam`: the most likely chain that a beam search finds, as long as the stopping rule
    lets it grow.

    Source: Qin et al. 2024, section 4, with its number of beams. Their code
    (github.com/ZongyueQin/MJSD) samples 2 continuations per beam.
    """

    kind = BEAM
    num_beams: PositiveCount = argument(
        8, "B, the number of beams: the B most likely continuations of all are the next ones"
    )

    def most_read(self, max_tokens: int) -> int:
        return self.num_beams * max_tokens

    def most_verified(self, max_tokens: int) -> int:
        return 0  # a chain ends within the window

    def usual_verification(self) -> JointVerification:
        return JointVerification()

    def drafter(self, parts: RoundParts) -> "_BeamDrafter":
        return _BeamDrafter(self, parts)

    def rounds(self, parts: RoundParts) -> Rounds:
        if isinstance(parts.verification, TreeVerification):
            return super().rounds(parts)
        self.check_rows(parts)
        return ChainRounds(parts, _BeamChains(self.drafter(parts), parts.memory))


class _BeamDrafter(TreeDrafter):
    def __init__(self, choices: Beam, parts: RoundParts) -> None:
        most = choices.most_read(usual_length(parts.stopping))
        memory = parts.memory
        super().__init__(parts, most)
        self.num_beams = choices.num_beams
        self._memory = memory
        self._probs = memory.distributions(most)

    def begin(self, committed: Sequence[int], limit: int) -> None:
        self._joint = {ROOT: 0.0}
        self._best = ROOT
        self._ended: dict[int, float] = {}

    def finish(self) -> Draft:
        """Return the best beam, with the distributions along it, which are in the memory of chains,
        too.
        """
        tree = self.tree
        chain = Draft()
        last = ROOT
        self._path = tree.path(self._best)
        for index, node in enumerate(self._path):
            last = chain.add(last, tree.tokens[node])
            token = torch.tensor([tree.tokens[node]], device=self._probs.device)
            self._memory.write(
                self._memory.indices[index], token, self._probs[tree.parents[node] + 1][None]
            )
        chain.draft_probs = self._memory.probs[0, : len(chain)]
        chain.num_draft_calls = tree.num_draft_calls
        chain.nan = tree.nan
        return chain

    def propose(self, frontier: Frontier, uniforms: Uniforms) -> tuple[Tensor, Tensor, Tensor]:
        probs = self.distribution(frontier.logits)
        device = frontier.logits.device
        self._probs[torch.tensor(frontier.nodes, device=device) + 1] = probs
        before = torch.tensor(
            [self._joint[node] for node in frontier.nodes], dtype=torch.float64, device=device
        )
        joint = (before[:, None] + probs.double().log()).flatten()
        best = joint.topk(min(self.num_beams, len(joint))).indices
        rows = best // probs.shape[1]
        tokens = best % probs.shape[1]
        return rows, tokens, probs[rows, tokens].double()

    def admit(self, proposals: Sequence[Proposal]) -> tuple[dict[int, Proposal], list[int]]:
        """Keep the best beams.

        One that has ended still competes, and the search is over once it is the best.
        """
        admitted = {}
        for proposal in proposals:
            if proposal.prob > 0:
                node = self.tree.add(proposal.parent, proposal.token)
                admitted[node] = proposal
                self._joint[node] = self._joint[proposal.parent] + log(proposal.prob)
                self._ended |= {node: self._joint[node]} if proposal.stop else {}
        running = {node: self._joint[node] for node in admitted} | self._ended
        best = sorted(running, key=lambda node: (-running[node], node))[: self.num_beams]
        self._best = best[0]
        if self._best in self._ended:
            return admitted, []
        return admitted, sorted(node for node in best if node not in self._ended)

    def after(self, path: Sequence[int]) -> tuple[State, int, int]:
        return self.state_after(self._best), len(self._path), len(path)

    def keep(self, path: Sequence[int]) -> None:
        super().keep(self._path[: len(path)])


class _BeamChains(Drafter):
    """Drafts the best beam of a single row, as `ChainRounds` asks for chains."""

    def __init__(self, search: _BeamDrafter, memory: DraftMemory) -> None:
        super().__init__(search.engine, search.rule)
        self.search = search
        self._memory = memory

    def warm_up(self, ends: Tensor) -> None:
        self.search.warm_up()

    def draft(self, rows: Sequence[Request], ends: Tensor) -> None:
        (row,) = rows
        draft = self.search.draft(
            row.committed,
            self.state,
            min(row.most_drafted, self.rule.max_tokens),
            row.draft_uniforms,
            ends,
        )
        row.num_drafted = len(draft)
        row.num_draft_calls = draft.num_draft_calls
        self.state, _, _ = self.search.after([])
        if draft.nan:  # verification tells the model by it
            row.num_drafted = 1
            self._memory.probs[0, 0] = torch.nan

    def keep(self, row: Request, num_accepted: int) -> None:
        self.search.keep(range(num_accepted))


class BlockSearch(Decoder):
    """The target alone, `block` tokens at a time: the most likely ones that a beam search finds.

    Seeds have no effect.

    Args:
        block: K, the tokens that are chosen together.
        beams: B, the beams of the search.

    Source: Qin et al. 2024, section 3.
    """

    lossless = False

    def __init__(
        self,
        pair: Pair,
        block: int = 4,
        beams: int = 8,
        warp: Warp | None = None,
        engine: str = "auto",
        window: int | None = None,
    ) -> None:
        check("block", block, PositiveCount)
        check("beams", beams, PositiveCount)
        self._choices = {
            "pair": pair,
            "block": block,
            "beams": beams,
            "warp": warp,
            "engine": engine,
            "window": window,
        }
        self.pair = pair
        window = checked_window(pair, window)
        search_engine = make_engine(engine, pair.target_lm, window, Beam(beams).most_read(block))
        self.single = BatchDecoder(
            pair, _SearchRounds(pair, search_engine, block, beams, warp or Warp())
        )

    def _batch_of(self, num_rows: int) -> BatchDecoder:
        raise UserError("BlockSearch decodes one prompt at a time; use max_batch=1.")


class _SearchRounds(Rounds):
    def __init__(self, pair: Pair, engine: Engine, block: int, beams: int, warp: Warp) -> None:
        super().__init__((engine,))
        self._model_id = pair.target_id
        self._rule = FixedLength(block)
        lm = engine.lm
        memory = DraftMemory(block, lm.vocab_size, lm.probs_dtype, lm.device)
        self._search = Beam(beams).drafter(
            RoundParts(pair, self.engines, self._rule, None, warp, memory)
        )

    def warm_up(self, ends: Tensor) -> None:
        self._search.warm_up()

    def start(self, rows: Sequence[Request]) -> None:
        self._state = self._rule.start_prompt(1, self.engines.target.lm.device)

    def take(self, rows: Sequence[Request], ends: Tensor, clock: Clock) -> tuple[list[Round], Mark]:
        (row,) = rows
        drafted = clock.mark()
        block = self._search.draft(
            row.committed, self._state, row.most_drafted + 1, row.verify_uniforms, ends
        )
        # As far as it was read: its last token is read with the next block, as a decoder's is read
        # in the next round.
        self._search.keep(range(len(block.tokens)))
        if block.nan:
            row.fail_by_nan(self._model_id)
        return [Round(block.tokens, num_target_calls=block.num_draft_calls)], drafted
