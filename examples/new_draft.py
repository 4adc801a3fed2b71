"""A way to draft of your own: copy what followed the text's last tokens before, in the text itself
or in one that is known.

Where responses repeat their prompt, a licence or a template, that costs no draft model (prompt
lookup, Saxena 2023). See docs/extend.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import specheads
from specheads import papers
from specheads.papers.trees.growth import RowDrafter, TreeDrafting
from specheads.papers.trees.verification import CHOSEN, ROOT, Draft
from specheads.settings import PositiveCount, check


class KnownText(TreeDrafting):
    """Drafts the tokens that followed the latest earlier occurrence of the text's last n tokens.

    Args:
        file: a text that is searched, too, as if it came before the prompt; None: only the prompt
            and the response are.
        max_ngram: the longest n that is searched for; shorter runs follow, down to one token, until
            one occurs.
    """

    kind = CHOSEN
    reads_draft = False

    def __init__(self, file: str | None = None, max_ngram: int = 3) -> None:
        check("drafting.max_ngram", max_ngram, PositiveCount)
        self.text = "" if file is None else Path(file).read_text()
        self.max_ngram = max_ngram
        self.tokens = list[int]()

    def pair(self, pair: specheads.Pair) -> specheads.Pair:
        """Learn which tokens the file has for this pair, which decodes as it is."""
        if self.text:
            self.tokens = pair.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        return pair

    def drafter(self, parts: Any) -> "KnownTextDrafter":
        """Return the drafter of one decoder, whose pair, engines, rules, warp and memory are
        `parts`.
        """
        rule = parts.stopping
        if rule.needs - {"token"}:
            raise specheads.UserError(
                f"no draft model is run, but stopping by {type(rule).__name__} needs its"
                f" {min(rule.needs)}; use a length, for example stopping=[fixed_length]."
            )
        return KnownTextDrafter(self.tokens, self.max_ngram, rule, parts.engines[-1].lm.device)


class KnownTextDrafter(RowDrafter):
    """Copies drafts from the known text and the committed tokens."""

    def __init__(
        self,
        tokens: Sequence[int],
        max_ngram: int,
        rule: specheads.stopping.StoppingRule,
        device: torch.device,
    ) -> None:
        self.tokens = tokens
        self.max_ngram = max_ngram
        self.rule = rule
        self._device = device

    def draft(
        self, committed: Sequence[int], state: Any, limit: int, uniforms: Any, ends: Tensor
    ) -> Draft:
        """Return the draft after the committed tokens, at most `limit` long.

        It ends where the rule or a token of `ends` says.
        """
        draft = Draft()
        node = ROOT
        limit = min(limit, self.rule.max_tokens)
        found = continuation([*self.tokens, *committed], self.max_ngram, limit)
        copied = torch.tensor(found, dtype=torch.long, device=self._device)
        for token, ended in zip(copied.tolist(), ends[copied].tolist(), strict=True):
            node = draft.add(node, token)
            state, stop = self.rule.step(state, {"token": copied[node : node + 1]})
            if ended or bool(stop):
                break
        self._state = state
        self._count = len(draft)
        return draft

    def after(self, path: Sequence[int]) -> tuple[Any, int, int]:
        """Return the rule's state, and how many tokens were drafted and how many of them are kept,
        after `path` was accepted.
        """
        return self._state, self._count, len(path)


def continuation(text: Sequence[int], max_ngram: int, limit: int) -> Sequence[int]:
    """Return up to `limit` tokens that followed an earlier occurrence of the last tokens of `text`.

    The longest run of last tokens, up to `max_ngram`, that occurs earlier counts, and its latest
    earlier occurrence.
    """
    ids = np.asarray(text)
    for size in range(min(max_ngram, len(text) - 1), 0, -1):
        # All except the run that ends the text
        runs = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)
        places = np.flatnonzero((runs == ids[len(ids) - size :]).all(axis=1))
        if len(places):
            start = int(places[-1]) + size
            # Where the text ends before the draft does, the draft repeats itself.
            return [text[start + number % (len(text) - start)] for number in range(max(0, limit))]
    return []


if __name__ == "__main__":
    decoder = specheads.SpeculativeDecoder(
        specheads.load_pair("mini"),
        drafting=KnownText(__file__),
        stopping=specheads.stopping.FixedLength(8),
        verification=papers.TreeMatch(),
        warp=specheads.Warp(temperature=0),
        engine="eager",
    )
    print(decoder.generate("from collections.abc import", max_new_tokens=32).stats)
