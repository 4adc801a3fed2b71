"""The loop of speculative decoding: draft -> stop? -> verify -> commit. It knows no strategy by name.

Batch 1 decodes; batches of prompts go one after another. Positions in memory trail the committed text: the target always
has all but the last committed token, the draft has at most that, and what it lacks is `pending` in its next forward.
"""

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.drafting import Autoregressive, Drafting, DraftMemory
from specheads.decoding.engine import Engine, ForwardOutput, make_engine
from specheads.decoding.pairing import check_pairing, default_verification
from specheads.decoding.records import DecodeStats, DraftKind, Generation, Round
from specheads.decoding.stopping import MAX_TOKENS, FixedLength, StoppingRule
from specheads.decoding.verification import TreeVerification, VerificationRule
from specheads.decoding.verifier import ChainVerifier, TreeVerifier
from specheads.errors import UserError
from specheads.pair import Pair
from specheads.sampling import Uniforms, Warp, check_no_nan

Prompt = str | Sequence[dict[str, str]] | Sequence[int] | Tensor


CHAINS = {DraftKind.CHAIN, DraftKind.BEAM}
MAX_WINDOW = 4096  # models that reach 128k positions would otherwise fill a device with empty memory


def checked_window(pair: Pair, window: int | None) -> int:
    """Return the positions to allocate; raises UserError for more than both models reach."""
    if window is None:
        return min(pair.window, MAX_WINDOW)
    if not 2 <= window <= pair.window:
        raise UserError(f"window={window} is outside 2..{pair.window}, what both models reach.")
    return window


def ends_among(vocab_size: int, stops: Iterable[int], device: torch.device) -> Tensor:
    """Return which tokens end a response, (V,) bool."""
    ends = torch.zeros(vocab_size, dtype=torch.bool)
    ends[[token for token in stops if 0 <= token < vocab_size]] = True
    return ends.to(device)


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
        verification: how much of it stands; default token verification for chains, joint (lossy) for beams, else a lossless rule for such drafts.
        warp: temperature, top-k, top-p of both models.
        engine: `auto`, `eager`, `compiled` or `cuda_graph`.
        window: positions of KV memory, for prompt and response together; default what both models reach, at most MAX_WINDOW.
    """

    def __init__(
        self,
        pair: Pair,
        drafting: Drafting | None = None,
        stopping: StoppingRule | None = None,
        verification: VerificationRule | TreeVerification | None = None,
        warp: Warp | None = None,
        engine: str = "auto",
        window: int | None = None,
    ) -> None:
        self.drafting = drafting or Autoregressive()
        self.pair = pair = self.drafting.pair(pair)
        self.verification = verification or default_verification(self.drafting)
        check_pairing(self.drafting, self.verification)
        self.stopping = stopping or self.verification.stopping or FixedLength()
        self.warp = warp or Warp()
        window = checked_window(pair, window)
        self._longest = max(self.stopping.max_tokens, MAX_TOKENS)
        # A chain ends within the window; a tree may have more nodes than are left of it.
        spare_capacity = 0 if self.drafting.kind in CHAINS else self.drafting.most_verified(self._longest)
        self.draft_engine = self.target_engine = make_engine(engine, pair.target_lm, window, spare_capacity)
        if self.drafting.reads_draft:
            self.draft_engine = make_engine(engine, pair.draft_lm, window, self.drafting.most_read(self._longest))
        self._memory: DraftMemory | None = None
        self.startup_seconds = 0.0  # spent on warming up, which no generation's seconds contain
        self._bind()

    def with_stopping(self, stopping: StoppingRule, verification: VerificationRule | None = None) -> "SpeculativeDecoder":
        """Return a decoder with other rules that shares this one's memory; use one of them at a time."""
        other = copy.copy(self)
        other.stopping, other.verification, other.startup_seconds = stopping, verification or self.verification, 0.0
        check_pairing(self.drafting, other.verification)
        way, longest = self.drafting, max(stopping.max_tokens, self._longest)
        if (
            any(needs(longest) > needs(self._longest) for needs in (way.most_read, way.most_verified))
            and way.kind is not DraftKind.CHAIN
        ):
            raise UserError(
                f"{type(stopping).__name__} drafts up to {stopping.max_tokens} tokens, but this decoder has memory for paths of "
                f"{self._longest}; make it with that rule."
            )
        other._bind()
        return other

    def warm_up(self) -> float:
        """Compile, load or capture all that generation will run; return the seconds it took. The first generation does it too."""
        start = time.perf_counter()
        with torch.no_grad():
            self._drafter.warm_up(ends_among(self.pair.vocab_size, (), self.draft_engine.lm.device))
            self._verifier.warm_up()
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
        engines = (self.target_engine, self.draft_engine)
        return start_session(self.pair, prompt, max_new_tokens, seed, engines if self.drafting.reads_draft else engines[:1])

    @torch.no_grad()
    def _rounds(self, session: Session, max_new_tokens: int, stop_tokens: Sequence[int] | None) -> Iterator[Round]:
        stops = self.pair.stop_tokens if stop_tokens is None else frozenset(stop_tokens)
        ends = ends_among(self.pair.vocab_size, stops, self.draft_engine.lm.device)
        state = self.stopping.init(1, self.draft_engine.lm.device)
        judging, num_probs_needed = self._verifier.init(), 0
        while session.finish_reason is None:
            start = session.clock()
            # The target adds a token of its own, so one fewer than what is left is worth drafting.
            limit = session.limit - len(session.committed) - 1
            planned = self.stopping.planned_length(state)
            planned = None if planned is None else planned.clamp_max(min(limit, self.stopping.max_tokens))
            if getattr(self.stopping, "verified", None) and session.target_hidden is not None:
                # Copied, because an engine may overwrite a unit's outcome in the next one.
                state = self.stopping.see(state, {"target_hidden": session.target_hidden.to(ends.device, copy=True)})
            draft = self._drafter.draft(session.committed, state, limit, session.draft_draws, ends, num_probs_needed)
            self._check_no_nan(draft.nan, False)
            drafted = session.clock()
            outcome, judging = self._verifier.verify(session.committed[-1], draft, planned, session.verify_draws, judging)
            self._check_no_nan(outcome.draft_nan, outcome.target_nan)
            num_probs_needed, session.target_hidden = outcome.num_probs_needed, outcome.target_hidden
            verified = session.clock()
            state, *counts = self._drafter.after(outcome.path)
            state = self.stopping.observe(state, *(torch.full_like(ends[:1], n, dtype=torch.long) for n in counts))
            self._drafter.keep(outcome.path)
            emitted = commit(session, [*outcome.tokens, outcome.next_token], stops, max_new_tokens)
            copies = 0 if draft.copied is None else int(draft.copied[list(outcome.path)].sum())
            num_accepted = len(outcome.path)
            yield Round(
                tokens=emitted,
                num_drafted=draft.num_drafted,
                num_accepted=num_accepted,
                num_discarded=draft.num_drafted - (num_accepted - copies),
                num_draft_calls=draft.num_draft_calls,
                draft_seconds=drafted - start,
                verify_seconds=verified - drafted,
                commit_seconds=session.clock() - verified,
                used_copy=copies > 0,
            )

    def _check_no_nan(self, draft: bool, target: bool) -> None:
        """Raise UserError for a model that computes no numbers; what it has read is forgotten."""
        if draft or target:
            self.draft_engine.clear()
            self.target_engine.clear()
        check_no_nan(self.pair.draft_id, draft)
        check_no_nan(self.pair.target_id, target)

    def _bind(self) -> None:
        """Prepare drafting with the stopping rule; a head reads one draft's hidden states, with another's it means nothing."""
        head = getattr(self.stopping, "head", None)
        if head is not None:
            head.check_fits(self.pair)
            head.to(self.draft_engine.lm.device)
        # Room for the longest draft, and no less than what most rules need: few sizes, few units.
        most = self.target_engine.padded(max(self.stopping.max_tokens, MAX_TOKENS) + 1) - 1
        if self._memory is None or len(self._memory.probs) != most + 1:  # decoders that share an engine share it, too
            self._memory = DraftMemory(most, self.pair.draft_lm, self.draft_engine.lm.device)
        memory = self._memory
        self._drafter = self.drafting.drafter(self.draft_engine, self.warp, self.stopping, memory)
        if isinstance(self.verification, TreeVerification):
            sizes = self.drafting.most_verified(self.stopping.max_tokens), self.stopping.max_tokens
            self._verifier = TreeVerifier(self.target_engine, self.warp, self.verification, *sizes)
        else:
            self._verifier = ChainVerifier(self.target_engine, self.warp, self.verification, memory, self.stopping.max_tokens)
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
        self.compile_key = (TargetStep, warp)

    def __call__(self, output: ForwardOutput, uniform: Tensor) -> Tensor:
        """Return the next token and whether there was a NaN, (2,) long."""
        probs = self.warp(output.logits[:, -1])
        return torch.cat([self.warp.draw(probs, uniform), probs.isnan().any(dim=-1).long()])


class Baseline:
    """The target alone, one token per forward, on the same engine and warping."""

    def __init__(self, pair: Pair, warp: Warp | None = None, engine: str | Engine = "auto", window: int | None = None) -> None:
        self.pair, self.warp = pair, warp or Warp()
        self.engine = make_engine(engine, pair.target_lm, checked_window(pair, window)) if isinstance(engine, str) else engine
        self._compiled_step = self.engine.compiled_step(TargetStep(self.warp))
        self.startup_seconds, self.is_warm = 0.0, False

    @torch.no_grad()
    def warm_up(self) -> float:
        """Compile, load or capture what generation will run; return the seconds it took. The first generation does it too."""
        start = time.perf_counter()
        self.engine.warm_up(self._compiled_step, (1,), torch.zeros(1, dtype=torch.float64, device=self.engine.lm.device))
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
            token, nan = self._compiled_step(last, session.verify_draws.take(1)).tolist()
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
