"""A way to draft of your own: copy what followed the text's last tokens in a text that is known beforehand.

Where responses repeat a licence, a template or a document, that costs no draft model. See docs/extend/draft.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import specheads
from specheads import papers
from specheads.papers.lookup import LookupDrafter


class KnownText(papers.Lookup):
    """Drafts from the text of a file, or from the response so far, whichever has the longer match."""

    def __init__(self, file: str, max_ngram: int = 3) -> None:
        super().__init__(max_ngram)
        self.text, self.tokens = Path(file).read_text(), list[int]()

    def pair(self, pair: specheads.Pair) -> specheads.Pair:
        """Learn which tokens the text has for this pair, which decodes as it is."""
        self.tokens = pair.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        return pair

    def drafter(self, parts: Any) -> LookupDrafter:
        """Return the drafter of one decoder, whose pair, engines, rules, warp and memory are `parts`."""
        usual = super().drafter(parts)
        return KnownTextDrafter(self.tokens, usual)


class KnownTextDrafter(LookupDrafter):
    """Reads the known text before the committed tokens."""

    def __init__(self, tokens: Sequence[int], usual: LookupDrafter) -> None:
        super().__init__(usual.max_ngram, usual.rule, usual._device)
        self.tokens = tokens

    def draft(self, committed: Sequence[int], *arguments: Any, **keywords: Any) -> Any:
        """Return a draft that continues the known text."""
        return super().draft([*self.tokens, *committed], *arguments, **keywords)


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
