"""One generation in progress: the committed text, its uniform numbers, and the start and end of every response."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.clock import Clock
from specheads.decoding.engine import Engine
from specheads.decoding.records import DecodeStats, Generation, Round
from specheads.errors import UserError
from specheads.pair import Pair
from specheads.sampling import Uniforms

Prompt = str | Sequence[dict[str, str]] | Sequence[int] | Tensor
MAX_WINDOW = 4096  # models that reach 128k positions would otherwise fill a device with empty memory


def checked_window(pair: Pair, window: int | None) -> int:
    """Return the positions to allocate; raises UserError for more than both models reach."""
    if window is None:
        return min(pair.window, MAX_WINDOW)
    if not 2 <= window <= pair.window:
        raise UserError(f"window={window} must be between 2 and {pair.window}, the positions that both models reach.")
    return window


def end_flags(vocab_size: int, stop_tokens: Iterable[int], device: torch.device) -> Tensor:
    """Return which tokens end a response, (V,) bool."""
    ends = torch.zeros(vocab_size, dtype=torch.bool)
    ends[[token for token in stop_tokens if 0 <= token < vocab_size]] = True
    return ends.to(device)


@dataclass
class Session:
    """One generation in progress."""

    committed: list[int]  # prompt and response
    prompt_length: int
    limit: int  # length at which the response ends
    max_new_tokens: int
    stop_tokens: frozenset[int]
    draft_uniforms: Uniforms
    verify_uniforms: Uniforms
    clock: Clock
    prefill_seconds: float = 0.0
    num_expected: float | None = None  # see DecodeStats
    finish_reason: str | None = None
    # (1, H), the state that the last token was decided from: before a response, the first engine's at the prompt's last token but
    # one.
    target_hidden: Tensor | None = None

    @property
    def response(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.committed[self.prompt_length :]

    @property
    def num_open(self) -> int:
        """How many more tokens the response may have."""
        return self.limit - len(self.committed)

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Append `tokens` up to the first stop token and note whether the response has ended; return the appended ones."""
        end = next((i for i, token in enumerate(tokens) if token in self.stop_tokens), None)
        emitted = list(tokens if end is None else tokens[: end + 1])
        self.committed += emitted
        if end is not None:
            self.finish_reason = "stop"
        elif len(self.committed) >= self.limit:
            self.finish_reason = "length" if len(self.response) >= self.max_new_tokens else "context"
        return emitted

    def finish(self, pair: Pair, rounds: Sequence[Round]) -> Generation:
        """Return the record of a session that has ended."""
        if self.finish_reason is None:
            raise RuntimeError("the response has not ended")
        tokens = torch.tensor(self.response)
        return Generation(
            prompt_ids=torch.tensor(self.committed[: self.prompt_length]),
            tokens=tokens,
            text=pair.decode(tokens),
            rounds=rounds,
            stats=DecodeStats.of(rounds, self.prefill_seconds, self.num_expected),
            finish_reason=self.finish_reason,
        )


def open_session(
    pair: Pair,
    prompt: Prompt,
    max_new_tokens: int,
    seed: int,
    stop_tokens: Sequence[int] | None,
    engines: Sequence[Engine],
    uniforms_device: torch.device | None = None,
    verify_uniforms: Uniforms | None = None,
) -> Session:
    """Encode a prompt; nothing is read yet.

    Args:
        stop_tokens: ids that end the response; None: the target's generation config.
        engines: the target's, then the draft's if there is one.
        uniforms_device: of the uniform numbers; None: the engines' devices.
        verify_uniforms: the numbers of verification, and of the target's tokens; None: those of the seed.

    Raises:
        UserError: a prompt that does not fit into memory, or a `max_new_tokens` that is not a positive integer.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be a positive integer.")
    committed = pair.encode(prompt).tolist()
    window = min(engine.capacity for engine in engines)
    if len(committed) >= window:
        raise UserError(
            f"the prompt has {len(committed)} tokens, but the decoder has memory for {window}; give it a larger window=."
        )
    return Session(
        committed=committed,
        prompt_length=len(committed),
        limit=min(len(committed) + max_new_tokens, window),
        max_new_tokens=max_new_tokens,
        stop_tokens=pair.stop_tokens if stop_tokens is None else frozenset(stop_tokens),
        # Separate streams, so that a draft's length does not shift the numbers of verification.
        draft_uniforms=Uniforms(uniforms_device or engines[-1].lm.device, seed, 0),
        verify_uniforms=verify_uniforms or Uniforms(uniforms_device or engines[0].lm.device, seed, 1),
        clock=Clock([engine.lm for engine in engines]),
    )


def start_session(
    pair: Pair, prompt: Prompt, max_new_tokens: int, seed: int, stop_tokens: Sequence[int] | None, engines: Sequence[Engine]
) -> Session:
    """Encode a prompt and read all of it but its last token into the engines' memory; see `open_session`."""
    session = open_session(pair, prompt, max_new_tokens, seed, stop_tokens, engines)
    committed = session.committed
    start = session.clock.mark()
    for engine in engines:
        engine.rewind(0)
        if len(committed) > 1:
            output = engine.forward(torch.tensor([committed[:-1]], device=engine.lm.device), num_logits=0)
            session.target_hidden = output.hidden[:, -1] if engine is engines[0] else session.target_hidden
    started, read = session.clock.read(start, session.clock.mark())
    session.prefill_seconds = read - started
    return session
