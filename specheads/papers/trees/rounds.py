"""Rounds of methods that draft trees: one row, whose drafter grows a tree on the host."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.clock import Clock, Mark
from specheads.decoding.drafting import Drafting
from specheads.decoding.engine import Engine
from specheads.decoding.prompt_reader import PromptReader
from specheads.decoding.records import DraftTree
from specheads.decoding.rows import Rounds, Row, RowOutcome
from specheads.decoding.step_inputs import DraftMemory, HostNumbers
from specheads.decoding.stopping import StoppingRule
from specheads.decoding.verification import Verification
from specheads.errors import UserError
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, has_nan
from specheads.papers.trees.growth import RowDrafter, TreeReader
from specheads.papers.trees.verification import Draft, TreeBlock, TreeMatch, TreeVerification


class TreeDrafting(Drafting):
    """The base of methods whose drafts have several candidates, or are chosen among several."""

    def usual_verification(self) -> Any:
        return TreeMatch()

    def most_verified(self, max_tokens: int) -> int:
        return self.most_read(max_tokens) or max_tokens

    def drafter(self, engine: Engine, warp: Warp, rule: StoppingRule, memory: DraftMemory) -> RowDrafter:
        """Return the drafter for these choices; a chain is written into `memory`.

        Raises:
            UserError: a rule that needs features which this method does not have.
        """
        raise NotImplementedError

    def check_rows(self, engines: Sequence[Engine], verification: Verification) -> None:
        """Raise UserError for engines with memory of several texts."""
        if engines[0].num_rows > 1:
            raise UserError(
                f"{type(self).__name__} with {type(verification).__name__} decodes one prompt at a time; batches need chains, "
                "for example drafting=autoregressive and verification=token."
            )

    def rounds(
        self,
        pair: Pair,
        engines: Sequence[Engine],
        stopping: StoppingRule,
        verification: Any,
        warp: Warp,
        memory: DraftMemory,
    ) -> Rounds:
        self.check_rows(engines, verification)
        most = max(self.most_verified(stopping.max_tokens), stopping.max_tokens)
        return _TreeRounds(pair, engines, self.drafter(engines[-1], warp, stopping, memory), stopping, verification, warp, most)


class _TreeRounds:
    """Rounds of one row: a drafter grows a tree, and one forward pass of the target reads its last token and all nodes."""

    def __init__(
        self,
        pair: Pair,
        engines: Sequence[Engine],
        drafter: RowDrafter,
        stopping: StoppingRule,
        verification: TreeVerification,
        warp: Warp,
        most_nodes: int,
    ) -> None:
        """`most_nodes`: of the largest draft."""
        self.engines, self.drafter, self.stopping, self.warp = engines, drafter, stopping, warp
        self.readers: Sequence[PromptReader] = [PromptReader(engine) for engine in engines]
        self._distribution, self._reader = verification.distribution, TreeReader(engines[0], most_nodes, most_nodes + 1)
        self._pair, self._counts = pair, HostNumbers((2, 1), engines[-1].lm.device)
        self._num_drafted, self._num_accepted = self._counts.tensor.unbind()

    def warm_up(self, ends: Tensor) -> None:
        self.drafter.warm_up(ends)
        self._reader.warm_up(nodes_alone=True)

    def start(self, rows: Sequence[Row], target_hidden: Mapping[int, Tensor]) -> None:
        self.state = self.stopping.start_prompt(1, self.engines[-1].lm.device)
        self._target_hidden = target_hidden.get(0)

    def num_expected(self, row: Row) -> float | None:
        return None

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[RowOutcome], Mark]:
        (row,) = rows
        self.state = self.stopping.start_round(self.state, self._target_hidden if self.stopping.reads_target else None)
        draft = self.drafter.draft(row.committed, self.state, row.most_drafted, row.draft_uniforms, ends)
        drafted = clock.mark()
        if draft.nan:
            return [RowOutcome([], nan_in=self._pair.draft_id)], drafted
        path, next_token, nan_in = self._verify(row, draft)
        self.state, self._counts.numbers[0], self._counts.numbers[1] = self.drafter.after(path)
        self._counts.send()
        self.state = self.stopping.end_round(self.state, self._num_drafted, self._num_accepted)
        self.drafter.keep(path)
        outcome = RowOutcome(
            tokens=[*(draft.tokens[node] for node in path), next_token],
            num_drafted=draft.num_drafted,
            num_accepted=len(path),
            num_draft_calls=draft.num_draft_calls,
            nan_in=nan_in,
            num_copies=sum(node >= draft.num_drafted for node in path),
            tree=DraftTree(draft.tokens, draft.parents, draft.num_drafted, path) if draft.is_tree else None,
        )
        return [outcome], drafted

    def _verify(self, row: Row, draft: Draft) -> tuple[Sequence[int], int, str | None]:
        """Verify a draft, and keep the accepted part in memory.

        Return the accepted nodes, from the context down, the target's token, and the model whose logits were NaN.
        """
        logits, hidden = self._reader.read_whole(draft, row.committed[-1])
        block = TreeBlock.of(draft, self.warp(logits))
        numbers = row.verify_uniforms.take(self.stopping.max_tokens + 1)
        nodes, token = self._distribution(block).decide(numbers[:-1], numbers[-1:])
        nans = [has_nan(block.target_probs).any(), torch.zeros_like(token, dtype=torch.bool)[0]]
        if block.draft_probs is not None:
            sampled = (block.samples >= 0).any(dim=1)  # other rows are left over from an earlier draft
            nans[1] = (has_nan(block.draft_probs) & sampled).any()
        next_token, target_nan, draft_nan, *path = torch.cat([token, torch.stack(nans).long(), nodes]).tolist()
        path = [node for node in path if node >= 0]
        self._reader.keep(path)
        ended = path[-1] + 1 if path else 0
        self._target_hidden = hidden[ended : ended + 1]
        return path, next_token, self._pair.draft_id if draft_nan else self._pair.target_id if target_nan else None
