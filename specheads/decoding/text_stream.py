"""The text of a response piece by piece: what later tokens can no longer change."""

import re
from collections.abc import Sequence

from specheads.pair.pair import Pair

# A byte of a tokenizer with byte fallback: invalid bytes change the text of all that follow each
# other, so none of them is text before another token comes.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream:
    """Cuts the text of a growing response into pieces; together they are the whole text."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        # Tokens before `shown` are out; [shown, read) decode to the text that the next piece
        # extends.
        self.shown = 0
        self.read = 0

    def next_piece(self, response: Sequence[int], has_ended: bool) -> str:
        """Return what text the tokens since the last piece add, of whole characters; it may be
        empty.
        """
        before = self.pair.decode(response[self.shown : self.read])
        text = self.pair.decode(response[self.shown :])
        if not has_ended and self._may_change(response, text):
            return ""
        if len(text) <= len(before):
            return ""
        self.shown = self.read
        self.read = len(response)
        return text[len(before) :]

    def _may_change(self, response: Sequence[int], text: str) -> bool:
        """Whether later tokens may change the end of a text: a replacement character there is one
        whose remaining bytes are still to come.
        """
        if text.endswith("\ufffd") or not len(response):
            return True
        token = self.pair.tokenizer.convert_ids_to_tokens(int(response[-1]))
        return isinstance(token, str) and _BYTE.fullmatch(token) is not None
