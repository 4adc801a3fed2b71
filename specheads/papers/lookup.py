"""Prompt lookup: drafts are copied from the text, after an earlier occurrence of its last tokens. No draft model is run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.rounds import RoundParts
from specheads.decoding.stopping import StoppingRule
from specheads.errors import UserError
from specheads.pair.sampling import Uniforms
from specheads.papers.trees.growth import RowDrafter
from specheads.papers.trees.rounds import TreeDrafting
from specheads.papers.trees.verification import CHOSEN, ROOT, Draft
from specheads.settings import PositiveCount, check


class Lookup(TreeDrafting):
    """`drafting=lookup`: the tokens that followed the latest earlier occurrence of the text's last n tokens.

    Args:
        max_ngram: the longest n that is searched for; shorter runs follow, down to one token, until one occurs.

    Source: prompt lookup decoding (Saxena 2023).
    """

    kind = CHOSEN
    reads_draft = False

    def __init__(self, max_ngram: int = 3) -> None:
        check("drafting.max_ngram", max_ngram, PositiveCount)
        self.max_ngram = max_ngram

    def drafter(self, parts: RoundParts) -> "LookupDrafter":
        """Return the drafter of rounds; raises UserError for a rule that needs a draft's distribution."""
        rule = parts.stopping
        if rule.needs - {"token"}:
            raise UserError(
                f"drafting=lookup runs no draft model, but stopping by {type(rule).__name__} needs its {min(rule.needs)}; "
                "use a length, for example stopping=[fixed_length]."
            )
        return LookupDrafter(self.max_ngram, rule, parts.engines[-1].lm.device)


class LookupDrafter(RowDrafter):
    """Copies drafts from the committed text."""

    def __init__(self, max_ngram: int, rule: StoppingRule, device: torch.device) -> None:
        self.max_ngram, self.rule, self._device = max_ngram, rule, device

    def draft(self, committed: Sequence[int], state: Any, limit: int, uniforms: Uniforms, ends: Tensor) -> Draft:
        draft, node = Draft(), ROOT
        limit = min(limit, self.rule.max_tokens)
        copied = torch.tensor(continuation(committed, self.max_ngram, limit), dtype=torch.long, device=self._device)
        for token, ended in zip(copied.tolist(), ends[copied].tolist(), strict=True):
            node = draft.add(node, token)
            state, stop = self.rule.step(state, {"token": copied[node : node + 1]})
            if ended or bool(stop):
                break
        self._state, self._count = state, len(draft)
        return draft

    def after(self, path: Sequence[int]) -> tuple[Any, int, int]:
        return self._state, self._count, len(path)


def continuation(text: Sequence[int], max_ngram: int, limit: int) -> Sequence[int]:
    """Return up to `limit` tokens that followed an earlier occurrence of the last tokens of `text`.

    The longest run of last tokens, up to `max_ngram`, that occurs earlier counts, and its latest earlier occurrence.
    """
    ids = np.asarray(text)
    for size in range(min(max_ngram, len(text) - 1), 0, -1):
        runs = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)  # all except the run that ends the text
        places = np.flatnonzero((runs == ids[len(ids) - size :]).all(axis=1))
        if len(places):
            start = int(places[-1]) + size
            # Where the text ends before the draft does, the draft repeats itself.
            return [text[start + number % (len(text) - start)] for number in range(max(0, limit))]
    return []
