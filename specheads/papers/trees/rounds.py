"""Rounds of methods that draft trees: one row, whose drafter grows a tree on the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.drafting import Drafting
from specheads.decoding.records import Clock, Mark, Round
from specheads.decoding.rounds import RoundParts
from specheads.decoding.rows import Rounds, Row
from specheads.decoding.step_inputs import HostNumbers
from specheads.errors import UserError
from specheads.pair.sampling import has_nan
from specheads.papers.trees.growth import RowDrafter, TreeReader
from specheads.papers.trees.verification import Draft, TreeBlock, TreeMatch


class TreeDrafting(Drafting):
    """The base of methods whose drafts have several candidates, or are chosen among several."""

    def usual_verification(self) -> Any:
        return TreeMatch()

    def most_verified(self, max_tokens: int) -> int:
        return self.most_read(max_tokens) or max_tokens

    def drafter(self, parts: RoundParts) -> RowDrafter:
        """Return the drafter of rounds, which runs the last of their engines; a chain is written into their memory."""
        raise NotImplementedError

    def check_rows(self, parts: RoundParts) -> None:
        """Raise UserError for engines with memory of several texts."""
        if parts.engines[0].num_rows > 1:
            raise UserError(
                f"{type(self).__name__} with {type(parts.verification).__name__} decodes one prompt at a time; batches "
                "need chains, for example drafting=autoregressive and verification=token."
            )

    def rounds(self, parts: RoundParts) -> Rounds:
        self.check_rows(parts)
        most = parts.stopping.max_tokens
        return _TreeRounds(parts, self.drafter(parts), max(self.most_verified(most), most))


class _TreeRounds(Rounds):
    """Rounds of one row: a drafter grows a tree, and one forward pass of the target reads its last token and all nodes."""

    def __init__(self, parts: RoundParts, drafter: RowDrafter, most_nodes: int) -> None:
        """`most_nodes`: of the largest draft."""
        super().__init__(parts.engines)
        self.drafter, self.stopping, self.warp, self._pair = drafter, parts.stopping, parts.warp, parts.pair
        self._distribution = parts.verification.distribution
        self._reader = TreeReader(parts.engines[0], most_nodes)
        self._counts = HostNumbers((2, 1), parts.engines[-1].lm.device)
        self._num_drafted, self._num_accepted = self._counts.tensor.unbind()

    def warm_up(self, ends: Tensor) -> None:
        self.drafter.warm_up()

    def start(self, rows: Sequence[Row]) -> None:
        self.state = self.stopping.start_prompt(1, self.engines[-1].lm.device)

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[Round], Mark]:
        (row,) = rows
        self.state = self.stopping.start_round(self.state)
        draft = self.drafter.draft(row.committed, self.state, row.most_drafted, row.draft_uniforms, ends)
        drafted = clock.mark()
        if draft.nan:
            row.fail_by_nan(self._pair.draft_id)
            return [Round([])], drafted
        path, next_token = self._verify(row, draft)
        self.state, self._counts.numbers[0], self._counts.numbers[1] = self.drafter.after(path)
        self._counts.send()
        self.state = self.stopping.end_round(self.state, self._num_drafted, self._num_accepted)
        self.drafter.keep(path)
        num_copied = sum(node >= draft.num_drafted for node in path)
        done = Round(
            tokens=[*(draft.tokens[node] for node in path), next_token],
            num_drafted=draft.num_drafted,
            num_accepted=len(path),
            num_discarded=draft.num_drafted - (len(path) - num_copied),
            num_draft_calls=draft.num_draft_calls,
            marks={"copy_rounds": num_copied > 0, **self.drafter.marks(path)},
        )
        return [done], drafted

    def _verify(self, row: Row, draft: Draft) -> tuple[Sequence[int], int]:
        """Verify a draft, and keep the accepted part in memory.

        Return the accepted nodes, from the context down, and the target's token.
        """
        block = TreeBlock.of(draft, self.warp(self._reader.read_whole(draft, row.committed[-1])))
        numbers = row.verify_uniforms.take(self.stopping.max_tokens + 1)
        nodes, token = self._distribution(block).decide(numbers[:-1], numbers[-1:])
        nans = [has_nan(block.target_probs).any(), torch.zeros_like(token, dtype=torch.bool)[0]]
        if block.draft_probs is not None:
            sampled = (block.samples >= 0).any(dim=1)  # other rows are left over from an earlier draft
            nans[1] = (has_nan(block.draft_probs) & sampled).any()
        next_token, target_nan, draft_nan, *path = torch.cat([token, torch.stack(nans).long(), nodes]).tolist()
        path = [node for node in path if node >= 0]
        self._reader.keep(path)
        if draft_nan or target_nan:
            row.fail_by_nan(self._pair.draft_id if draft_nan else self._pair.target_id)
        return path, next_token
