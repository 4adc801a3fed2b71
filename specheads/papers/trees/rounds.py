"""Rounds of methods that draft trees or beams: one row, whose drafter grows a tree on the host."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specheads.decoding.clock import Clock, Mark
from specheads.decoding.drafting import Drafting
from specheads.decoding.engine import Engine
from specheads.decoding.prompt_reader import PromptReader
from specheads.decoding.records import DraftTree
from specheads.decoding.rounds import expected_of
from specheads.decoding.rows import Row, RowOutcome
from specheads.decoding.step_inputs import DraftMemory, HostNumbers
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.verification import VerificationRule
from specheads.decoding.verifier import ChainVerifier, VerifyStep
from specheads.errors import UserError
from specheads.pair.pair import Pair
from specheads.pair.sampling import Uniforms, Warp, has_nan
from specheads.papers.trees.growth import Nodes, TreeReader
from specheads.papers.trees.verification import BEAM, Draft, TreeBlock, TreeVerification


class Drafter(Protocol):
    """Drafts for one row, round by round."""

    def warm_up(self, ends: Tensor) -> None:
        """Prepare the engine for all that drafting runs."""

    def draft(self, committed: Sequence[int], state: Any, limit: int, uniforms: Uniforms, ends: Tensor) -> Draft:
        """Return a draft after the committed tokens. The draft model has not read the last of them, and maybe more.

        Args:
            state: of the stopping rule, B = 1.
            limit: the longest useful path.
            uniforms: the numbers at which tokens are sampled.
            ends: (V,) bool, the tokens that end a response and therefore a path.
        """

    def after(self, path: Sequence[int]) -> tuple[Any, int, int]:
        """Return the stopping rule's state along a path of the last draft, and the numbers of its tokens and of accepted ones.

        Args:
            path: the accepted nodes, with which that path begins.
        """

    def keep(self, path: Sequence[int]) -> None:
        """Forget the last draft except for the accepted nodes `path`."""


class TreeDrafting(Drafting):
    """The base of methods whose drafts have several candidates, or are chosen among several."""

    def most_verified(self, max_tokens: int) -> int:
        return max_tokens

    def drafter(self, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> Drafter:
        """Return the drafter for these choices; a chain is written into `memory`.

        Raises:
            UserError: a rule that needs features which this method does not have.
        """
        raise NotImplementedError

    def rounds(
        self,
        pair: Pair,
        engines: Sequence[Engine],
        stopping: StoppingRule,
        verification: VerificationRule | TreeVerification,
        warp: Warp,
        memory: DraftMemory,
    ) -> "_TreeRounds":
        if engines[0].num_rows > 1:
            raise UserError(
                f"{type(self).__name__} with {type(verification).__name__} decodes one prompt at a time; batches need chains, "
                "for example drafting=autoregressive and verification=token."
            )
        drafter, target = self.drafter(engines[-1], warp, stopping, memory), engines[0]
        verifier: Verifier
        if isinstance(verification, TreeVerification):
            most = max(self.most_verified(stopping.max_tokens), stopping.max_tokens)
            verifier = _TreeVerifier(target, warp, verification, most, stopping.max_tokens, is_chain=self.kind == BEAM)
        else:
            verifier = _BeamVerifier(target, VerifyStep(warp, verification, memory), stopping.max_tokens)
        return _TreeRounds(pair, engines, drafter, verifier, stopping)


class Outcome(NamedTuple):
    """The outcome of a verification."""

    path: Sequence[int]  # the accepted nodes, from the context down
    next_token: int  # the target's
    hidden: Tensor  # (1, H), the state that it was decided from
    draft_nan: bool
    target_nan: bool
    tree: DraftTree | None


class _TreeVerifier:
    """Verifies trees: one forward pass over the last committed token and all nodes, then the rule."""

    def __init__(self, engine: Engine, warp: Warp, rule: TreeVerification, most_nodes: int, deepest: int, is_chain: bool) -> None:
        """`most_nodes`, `deepest`: of the largest draft; `is_chain`: every draft is one, and no tree is recorded."""
        self.engine, self.warp, self.rule, self._deepest, self._is_chain = engine, warp, rule, deepest, is_chain
        self.reader = TreeReader(engine, most_nodes, most_nodes + 1)

    def warm_up(self) -> None:
        """Prepare the engine for all that verification runs."""
        self.reader.warm_up_nodes()

    def start(self, row: Row) -> None:
        """There is no state."""

    def verify(self, row: Row, draft: Draft, planned: int) -> Outcome:
        """Verify a draft, and keep the accepted part in memory."""
        nodes = Nodes(draft.tokens.tolist(), draft.parents.tolist(), draft.depth.tolist())
        logits, hidden = self.reader.read_whole(nodes, row.committed[-1])
        block = TreeBlock.of(draft, self.warp(logits), self.rule.shared_logits)
        numbers = row.verify_uniforms.take(self._deepest + 1)
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
        tree = None if self._is_chain else DraftTree(nodes.tokens, nodes.parents, draft.num_drafted, path)
        return Outcome(path, next_token, hidden[ended : ended + 1], bool(draft_nan), bool(target_nan), tree)


class _BeamVerifier:
    """Verifies the chain that a search wrote into the memory of chains."""

    def __init__(self, engine: Engine, step: VerifyStep, most: int) -> None:
        """`most`: the length of the longest chain."""
        self.rule, self._chains = step.rule, ChainVerifier(engine, step, most)

    def warm_up(self) -> None:
        """Prepare the engine for all that verification runs."""
        self._chains.warm_up()

    def start(self, row: Row) -> None:
        """Begin another prompt."""
        self._chains.start([row])

    def verify(self, row: Row, draft: Draft, planned: int) -> Outcome:
        """Verify a draft, and keep the accepted part in memory."""
        row.num_drafted, row.has_next_probs = len(draft.tokens), False
        (result,), hidden = self._chains.verify([row], [planned])
        path = range(result.num_accepted)
        return Outcome(path, result.next_token, hidden, result.draft_nan, result.target_nan, None)


Verifier = _TreeVerifier | _BeamVerifier


class _TreeRounds:
    """Rounds of one row with a drafter of its own."""

    def __init__(
        self,
        pair: Pair,
        engines: Sequence[Engine],
        drafter: Drafter,
        verifier: Verifier,
        stopping: StoppingRule,
    ) -> None:
        self.engines, self.drafter, self.verifier, self.stopping = engines, drafter, verifier, stopping
        self.readers: Sequence[PromptReader] = [PromptReader(engine) for engine in engines]
        self._pair, self._counts = pair, HostNumbers((2, 1), engines[-1].lm.device)
        self._num_drafted, self._num_accepted = self._counts.tensor.unbind()

    def warm_up(self, ends: Tensor) -> None:
        self.drafter.warm_up(ends)
        self.verifier.warm_up()

    def start(self, rows: Sequence[Row], target_hidden: Mapping[int, Tensor]) -> None:
        self.state = self.stopping.start_prompt(1, self.engines[-1].lm.device)
        self._target_hidden = target_hidden.get(0)
        self.verifier.start(rows[0])

    def num_expected(self, row: Row) -> float | None:
        return expected_of(self.stopping, self.verifier.rule, self.state)

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[RowOutcome], Mark]:
        (row,) = rows
        self.state = self.stopping.start_round(self.state, self._target_hidden if self.stopping.reads_target else None)
        planned = self.stopping.planned_length(self.state) if getattr(self.verifier.rule, "reads_planned", False) else None
        most = min(row.most_drafted, self.stopping.max_tokens)
        draft = self.drafter.draft(row.committed, self.state, row.most_drafted, row.draft_uniforms, ends)
        drafted = clock.mark()
        if draft.nan:
            return [RowOutcome([], nan_in=self._pair.draft_id)], drafted
        outcome = self.verifier.verify(row, draft, 0 if planned is None else min(int(planned), most))
        self._target_hidden = outcome.hidden
        self.state, self._counts.numbers[0], self._counts.numbers[1] = self.drafter.after(outcome.path)
        self._counts.send()
        self.state = self.stopping.end_round(self.state, self._num_drafted, self._num_accepted)
        self.drafter.keep(outcome.path)
        path = list(outcome.path)
        result = RowOutcome(
            tokens=[*draft.tokens[path].tolist(), outcome.next_token],
            num_drafted=draft.num_drafted,
            num_accepted=len(path),
            num_draft_calls=draft.num_draft_calls,
            nan_in=self._pair.draft_id if outcome.draft_nan else self._pair.target_id if outcome.target_nan else None,
            num_copies=0 if draft.copied is None else int(draft.copied[path].sum()),
            tree=outcome.tree,
        )
        return [result], drafted
