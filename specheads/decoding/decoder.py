"""The loop of speculative decoding: draft -> stop? -> verify -> commit. It knows no strategy by name.

Batch 1 decodes; batches of prompts go one after another. Positions in memory trail the committed text: the target always
has all but the last committed token, the draft has at most that, and what it lacks is `pending` in its next forward.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.drafting import Autoregressive, DraftMemory
from specheads.decoding.engine import Engine, ForwardOutput, make_engine
from specheads.decoding.records import DecodeStats, Draft, Generation, Round
from specheads.decoding.stopping import MAX_TOKENS, FixedLength, StoppingRule
from specheads.decoding.verification import NUM_FACTS, TokenVerification, VerificationRule, VerifyStep
from specheads.errors import UserError
from specheads.pair import Pair
from specheads.sampling import Uniforms, Warp, check_no_nan

Prompt = str | Sequence[dict[str, str]] | Sequence[int] | Tensor


MAX_WINDOW = 4096  # models that reach 128k positions would otherwise fill a device with empty memory


def checked_window(pair: Pair, window: int | None) -> int:
    """Return the positions to allocate; raises UserError for more than both models reach."""
    if window is None:
        return min(pair.window, MAX_WINDOW)
    if not 2 <= window <= pair.window:
        raise UserError(f"window={window} is outside 2..{pair.window}, what both models reach.")
    return window


class Clock:
    """Seconds on the host, after the device has finished what it was given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self) -> float:
        if self.device.type == "cuda":
            for number in range(torch.cuda.device_count()):  # a target may be spread over all of them
                torch.cuda.synchronize(number)
        return time.perf_counter()


@dataclass
class Session:
    """One generation in progress."""

    committed: list[int]  # prompt and response
    prompt_length: int
    limit: int  # length at which the response ends
    draft_draws: Uniforms
    verify_draws: Uniforms
    clock: Clock
    prefill_seconds: float = 0.0
    finish_reason: str | None = None
    # (1, H), what the last token was decided from: before a response, the first engine's state at the last but one of the prompt.
    target_hidden: Tensor | None = None

    @property
    def response(self) -> list[int]:
        return self.committed[self.prompt_length :]


def start_session(pair: Pair, prompt: Prompt, max_new_tokens: int, seed: int, engines: Sequence[Engine]) -> Session:
    """Encode a prompt and bring all of it but its last token into the engines' memory."""
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} generates nothing; use at least 1.")
    committed = pair.encode(prompt).tolist()
    window = min(engine.capacity for engine in engines)
    if len(committed) >= window:
        raise UserError(
            f"the prompt has {len(committed)} tokens, but the decoder has memory for {window}; give it a larger window=."
        )
    limit = min(len(committed) + max_new_tokens, window)
    # Streams of their own, so that a draft's length does not move the numbers that verification sees.
    draws = (Uniforms(engine.lm.device, seed, number) for number, engine in enumerate((engines[-1], engines[0])))
    session = Session(committed, len(committed), limit, *draws, Clock(engines[0].lm.device))
    start = session.clock()
    for engine in engines:
        engine.rewind(0)
        if len(committed) > 1:
            output = engine.forward(torch.tensor([committed[:-1]], device=engine.lm.device), num_logits=0)
            session.target_hidden = output.hidden[:, -1] if engine is engines[0] else session.target_hidden
    session.prefill_seconds = session.clock() - start
    return session


def commit(session: Session, tokens: Sequence[int], stop_tokens: frozenset[int], max_new_tokens: int) -> list[int]:
    """Append `tokens` up to the first stop token and note whether the response has ended; return what was appended."""
    end = next((i for i, token in enumerate(tokens) if token in stop_tokens), None)
    emitted = list(tokens if end is None else tokens[: end + 1])
    session.committed += emitted
    if end is not None:
        session.finish_reason = "stop"
    elif len(session.committed) >= session.limit:
        session.finish_reason = "length" if len(session.response) >= max_new_tokens else "context"
    return emitted


class SpeculativeDecoder:
    """A pair, and one choice on each axis.

    Args:
        pair: draft and target.
        drafting: how tokens are proposed; default a chain.
        stopping: when a draft is long enough; default what the verification rule says, or five tokens.
        verification: how much of it stands; default token verification.
        warp: temperature, top-k, top-p of both models.
        engine: `auto`, `eager`, `compiled` or `cuda_graph`.
        window: positions of KV memory, for prompt and response together; default what both models reach, at most MAX_WINDOW.
    """

    def __init__(
        self,
        pair: Pair,
        drafting: Autoregressive | None = None,
        stopping: StoppingRule | None = None,
        verification: VerificationRule | None = None,
        warp: Warp | None = None,
        engine: str = "auto",
        window: int | None = None,
    ) -> None:
        self.pair = pair
        self.drafting = drafting or Autoregressive()
        self.verification = verification or TokenVerification()
        self.stopping = stopping or self.verification.stopping or FixedLength()
        self.warp = warp or Warp()
        window = checked_window(pair, window)
        self.draft_engine = make_engine(engine, pair.draft_lm, window)
        self.target_engine = make_engine(engine, pair.target_lm, window)
        self.startup_seconds = 0.0  # spent on warming up, which no generation's seconds contain
        self._bind()

    def with_stopping(self, stopping: StoppingRule, verification: VerificationRule | None = None) -> "SpeculativeDecoder":
        """Return a decoder with other rules that shares this one's memory; use one of them at a time."""
        other = copy.copy(self)
        other.stopping, other.verification, other.startup_seconds = stopping, verification or self.verification, 0.0
        other._bind()
        return other

    def warm_up(self) -> float:
        """Compile, load or capture all that generation will run; return the seconds it took. The first generation does it too."""
        start = time.perf_counter()
        with torch.no_grad():
            ends = torch.zeros(self.pair.vocab_size, dtype=torch.bool, device=self.draft_engine.lm.device)
            self._drafter.rehearse(ends)
            longest = self.target_engine.padded(self.stopping.max_tokens + 1)
            counts = sorted({self.target_engine.padded(count) for count in range(1, longest + 1)})
            device = self.target_engine.lm.device
            state, draws = self.verification.init(1, device), torch.zeros(2, dtype=torch.float64, device=device)
            self.target_engine.rehearse(self._verify_unit, counts, self._target_memory.probs, draws, self._lengths, state)
        self.is_warm = True
        self.startup_seconds += time.perf_counter() - start
        return time.perf_counter() - start

    def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, seed: int = 0, stop_tokens: Sequence[int] | None = None
    ) -> Generation:
        """Return the response to `prompt`: ids (T,), a string, or chat messages.

        Args:
            max_new_tokens: the response ends there at the latest, or where the models' window does.
            seed: of everything random in this generation.
            stop_tokens: ids that end the response; default: the target's generation config.
        """
        session = self._start(prompt, max_new_tokens, seed)
        rounds = list(self._rounds(session, max_new_tokens, stop_tokens))
        return finish(self.pair, session, rounds)

    def stream(
        self, prompt: Prompt, max_new_tokens: int = 256, seed: int = 0, stop_tokens: Sequence[int] | None = None
    ) -> Iterator[str]:
        """Yield the response's text piece by piece, whole characters only; one stream at a time uses a decoder."""
        return self._pieces(self._start(prompt, max_new_tokens, seed), max_new_tokens, stop_tokens)

    def _pieces(self, session: Session, max_new_tokens: int, stop_tokens: Sequence[int] | None) -> Iterator[str]:
        shown = read = 0  # tokens before `shown` are out; [shown, read) gave the text that the next piece extends
        for _ in self._rounds(session, max_new_tokens, stop_tokens):
            response = session.response
            before, text = self.pair.decode(response[shown:read]), self.pair.decode(response[shown:])
            # A replacement character at the end is a character whose remaining bytes are still to come.
            if len(text) > len(before) and (not text.endswith("\ufffd") or session.finish_reason):
                yield text[len(before) :]
                shown, read = read, len(response)

    def _start(self, prompt: Prompt, max_new_tokens: int, seed: int) -> Session:
        if not self.is_warm:
            self.warm_up()
        return start_session(self.pair, prompt, max_new_tokens, seed, (self.target_engine, self.draft_engine))

    @torch.no_grad()
    def _rounds(self, session: Session, max_new_tokens: int, stop_tokens: Sequence[int] | None) -> Iterator[Round]:
        stops = self.pair.stop_tokens if stop_tokens is None else frozenset(stop_tokens)
        ends = torch.zeros(self.pair.vocab_size, dtype=torch.bool)
        ends[[token for token in stops if 0 <= token < len(ends)]] = True
        ends = ends.to(self.draft_engine.lm.device)
        state = self.stopping.init(1, self.draft_engine.lm.device)
        judging, owed = self.verification.init(1, self.target_engine.lm.device), 0
        while session.finish_reason is None:
            start = session.clock()
            # The target adds a token of its own, so one fewer than what is left is worth drafting.
            limit = session.limit - len(session.committed) - 1
            planned = self.stopping.planned_length(state)
            if getattr(self.stopping, "verified", None) and session.target_hidden is not None:
                # Copied, because an engine may overwrite a unit's outcome in the next one.
                state = self.stopping.see(state, {"target_hidden": session.target_hidden.to(ends.device, copy=True)})
            draft, state = self._draft(session, state, limit, ends, owed)
            drafted = session.clock()
            self._planned.copy_(
                torch.zeros_like(self._planned) if planned is None else planned.clamp_max(min(limit, self.stopping.max_tokens))
            )
            (num_accepted, next_token, owed, *draft_tokens), judging = self._verify(session, draft, judging)
            verified = session.clock()
            state = self.stopping.observe(
                state, *(torch.full_like(ends[:1], n, dtype=torch.long) for n in (len(draft_tokens), num_accepted))
            )
            base = len(session.committed)
            self.target_engine.rewind(base + num_accepted)
            self.draft_engine.rewind(min(self.draft_engine.length, base + num_accepted))
            emitted = commit(session, [*draft_tokens[:num_accepted], next_token], stops, max_new_tokens)
            yield Round(
                tokens=emitted,
                num_drafted=len(draft_tokens),
                num_accepted=num_accepted,
                num_discarded=len(draft_tokens) - num_accepted,
                num_draft_calls=draft.num_draft_calls,
                draft_seconds=drafted - start,
                verify_seconds=verified - drafted,
                commit_seconds=session.clock() - verified,
            )

    def _draft(self, session: Session, state: Any, limit: int, ends: Tensor, owed: int) -> tuple[Draft, Any]:
        engine = self.draft_engine
        pending = torch.tensor([session.committed[engine.length :]], device=engine.lm.device)
        return self._drafter.draft(pending, state, limit, session.draft_draws, ends, owed)

    def _verify(self, session: Session, draft: Draft, state: Any) -> tuple[list[int], Any]:
        """Return how many tokens were accepted, the target's own token, how many to come owe the draft's law, and the drafted
        ones; and the verification rule's state.
        """
        num_drafted = len(draft.tokens)
        count = self.target_engine.padded(num_drafted + 1)
        memory = self._target_memory
        if memory is not self._draft_memory:
            memory.copy_(self._draft_memory, num_drafted)
        memory.sequence[:, :1] = session.committed[-1]
        self._num_drafted.fill_(num_drafted)
        self._num_laws.fill_(num_drafted + (draft.next_probs is not None))
        draws = session.verify_draws.take(2)
        inputs = memory.probs, draws, self._lengths, state
        facts, hidden, state = self._verify_unit(memory.sequence[:, :count], *inputs)
        facts = facts.tolist()
        *verdict, draft_nan, target_nan = facts[:NUM_FACTS]
        session.target_hidden = hidden[:, verdict[0]]
        if draft_nan or target_nan:
            self.draft_engine.clear()
            self.target_engine.clear()
        check_no_nan(self.pair.draft_id, draft_nan)
        check_no_nan(self.pair.target_id, target_nan)
        return verdict + facts[NUM_FACTS : NUM_FACTS + num_drafted], state

    def _bind(self) -> None:
        """Prepare drafting with the stopping rule; a head reads one draft's hidden states, with another's it means nothing."""
        head = getattr(self.stopping, "head", None)
        if head is not None:
            head.check_fits(self.pair)
            head.to(self.draft_engine.lm.device)
        # Room for the longest draft, and no less than what most rules need: few sizes, few units.
        most = self.target_engine.padded(max(self.stopping.max_tokens, MAX_TOKENS) + 1) - 1
        devices = [engine.lm.device for engine in (self.draft_engine, self.target_engine)]
        self._draft_memory = self._target_memory = DraftMemory(most, self.pair.draft_lm, devices[0])
        if devices[1] != devices[0]:
            self._target_memory = DraftMemory(most, self.pair.draft_lm, devices[1])
        self._drafter = self.drafting.drafter(self.draft_engine, self.warp, self.stopping, self._draft_memory)
        self._lengths = torch.zeros(3, dtype=torch.long, device=devices[1])
        self._num_drafted, self._planned, self._num_laws = self._lengths.split(1)
        self._verify_unit = self.target_engine.unit(VerifyStep(self.warp, self.verification, most + 1), all_logits=True)
        self.is_warm = False


def finish(pair: Pair, session: Session, rounds: Sequence[Round]) -> Generation:
    """Return the record of a session that has ended."""
    tokens = torch.tensor(session.response)
    return Generation(
        prompt_ids=torch.tensor(session.committed[: session.prompt_length]),
        tokens=tokens,
        text=pair.decode(tokens),
        rounds=rounds,
        stats=DecodeStats.of(rounds, session.prefill_seconds),
        finish_reason=session.finish_reason,
    )


class TargetStep:
    """What follows a forward of the target alone."""

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.program = (TargetStep, warp)

    def __call__(self, output: ForwardOutput, uniform: Tensor) -> Tensor:
        """Return the next token and whether there was a NaN, (2,) long."""
        probs = self.warp(output.logits[:, -1])
        return torch.cat([self.warp.draw(probs, uniform), probs.isnan().any(dim=-1).long()])


class Baseline:
    """The target alone, one token per forward, on the same engine and warping."""

    def __init__(self, pair: Pair, warp: Warp | None = None, engine: str | Engine = "auto", window: int | None = None) -> None:
        self.pair, self.warp = pair, warp or Warp()
        self.engine = make_engine(engine, pair.target_lm, checked_window(pair, window)) if isinstance(engine, str) else engine
        self._unit = self.engine.unit(TargetStep(self.warp))
        self.startup_seconds, self.is_warm = 0.0, False

    @torch.no_grad()
    def warm_up(self) -> float:
        """Compile, load or capture what generation will run; return the seconds it took. The first generation does it too."""
        start = time.perf_counter()
        self.engine.rehearse(self._unit, (1,), torch.zeros(1, dtype=torch.float64, device=self.engine.lm.device))
        self.startup_seconds, self.is_warm = time.perf_counter() - start, True
        return self.startup_seconds

    @torch.no_grad()
    def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, seed: int = 0, stop_tokens: Sequence[int] | None = None
    ) -> Generation:
        """Return the response to `prompt`; see SpeculativeDecoder.generate."""
        if not self.is_warm:
            self.warm_up()
        stops = self.pair.stop_tokens if stop_tokens is None else frozenset(stop_tokens)
        session = start_session(self.pair, prompt, max_new_tokens, seed, (self.engine,))
        rounds = []
        while session.finish_reason is None:
            start = session.clock()
            last = torch.tensor([session.committed[-1:]], device=self.engine.lm.device)
            token, nan = self._unit(last, session.verify_draws.take(1)).tolist()
            verified = session.clock()
            if nan:
                self.engine.clear()
            check_no_nan(self.pair.target_id, nan)
            emitted = commit(session, [token], stops, max_new_tokens)
            rounds.append(Round(emitted, 0, 0, 0, 0, 0.0, verified - start, session.clock() - verified))
        return finish(self.pair, session, rounds)


def generate_baseline(
    pair: Pair,
    prompt: Prompt,
    max_new_tokens: int = 256,
    seed: int = 0,
    warp: Warp | None = None,
    engine: str = "auto",
    stop_tokens: Sequence[int] | None = None,
) -> Generation:
    """Return the target's own response to `prompt`, decoded without a draft by the same engine and warping."""
    return Baseline(pair, warp, engine).generate(prompt, max_new_tokens, seed, stop_tokens)
