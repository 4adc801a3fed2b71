"""A request: a prompt and its response in progress. It says where a response ends, and checks what
a caller asks for.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from torch import Tensor

from specheads.decoding.records import Round
from specheads.errors import UserError
from specheads.pair.pair import Pair, checked_ids
from specheads.pair.sampling import Uniforms, nan_message

# Models that reach 128k positions would otherwise fill a device with empty memory.
MAX_WINDOW = 4096

StopTokens = int | Iterable[int] | Tensor | None
Prompt = str | Sequence[dict[str, str]] | Sequence[int] | Tensor


@dataclass
class Request:
    """A response in progress: a row of a batch."""

    number: int  # the prompt's number
    committed: list[int]  # prompt and response
    prompt_length: int
    limit: int  # length of the text at which the response ends
    draft_limit: int  # length up to which the draft reads the text
    num_skipped: int  # tokens at its beginning that the draft does not read
    max_new_tokens: int
    stop_tokens: frozenset[int]
    # Separate streams, so that a draft's length does not shift the numbers of verification.
    draft_uniforms: Uniforms
    verify_uniforms: Uniforms
    row: int = 0  # of the engines' KV cache
    num_read: int = 0  # positions in the draft's KV cache, of steps over several rows
    drafted: list[int] = field(default_factory=list)  # this round's, of steps over several rows
    num_drafted: int = 0  # this round's drafted tokens
    num_draft_calls: int = 0  # this round's draft steps
    rounds: list[Round] = field(default_factory=list)
    ready_at: float = 0.0  # when its prompt was read, or its last tokens were committed
    prefill_seconds: float = 0.0
    num_expected: float | None = None  # see DecodeStats
    finish_reason: str | None = None
    failure: str | None = None  # why it cannot go on

    @property
    def response(self) -> list[int]:
        return self.committed[self.prompt_length :]

    @property
    def most_drafted(self) -> int:
        """The most tokens that a draft may have: the target adds one after the accepted ones."""
        return max(0, min(self.limit, self.draft_limit) - len(self.committed) - 1)

    @property
    def has_ended(self) -> bool:
        return self.failure is not None or self.finish_reason is not None

    @property
    def unread(self) -> list[int]:
        """The committed and drafted tokens that the draft's KV cache lacks."""
        start = self.num_read + self.num_skipped
        return self.committed[start:] + self.drafted[max(0, start - len(self.committed)) :]

    def fail_by_nan(self, model: str) -> None:
        """End the response because a model's logits were NaN; its last round brings no tokens."""
        self.failure = nan_message(model, len(self.response))

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Append `tokens` up to the first stop token, and note whether the response has ended.

        Return the appended ones.
        """
        emitted = []
        for token in tokens:
            emitted.append(token)
            if token in self.stop_tokens:
                self.finish_reason = "stop"
                break
        self.committed += emitted
        if self.finish_reason is None and len(self.committed) >= self.limit:
            is_whole = len(self.response) >= self.max_new_tokens
            self.finish_reason = "length" if is_whole else "context"
        return emitted


def checked_number(
    name: str, value: object, least: int = 1, most: float = math.inf, what: str = ""
) -> int:
    """Return an integer, of numpy for example, from `least` to `most`.

    Raises UserError for anything else, with `what` it is.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most:
        return int(value)
    expected = "a positive integer" if least else "a non-negative integer"
    if most < math.inf:
        expected = f"between {least} and {most}"
    raise UserError(f"{name}={value!r} must be {expected}{what}.")


def checked_window(pair: Pair, window: int | None) -> int:
    """Return the positions to allocate; raises UserError for more than the target reaches."""
    most = pair.target_lm.window
    if window is None:
        return min(most, MAX_WINDOW)
    return checked_number("window", window, 2, most, ", the positions that the target reaches")


def checked_stop_tokens(stop_tokens: StopTokens) -> list[int] | None:
    """Return the ids of `stop_tokens`; raises UserError for anything else, text for example."""
    if stop_tokens is None:
        return None
    several = stop_tokens if isinstance(stop_tokens, Iterable) else [stop_tokens]
    try:
        return checked_ids(several)
    except TypeError:
        raise UserError(
            f"stop_tokens={stop_tokens!r} must be token ids, such as [2]; for a token's text, take "
            "pair.tokenizer.convert_tokens_to_ids."
        ) from None
