"""Decoders: speculative decoding with one choice on each axis, and the target alone.

They know no strategy by name.

Positions in memory trail the committed text: the target always has all but the last committed
token, the draft has at most that, and reads the missing ones first in its next forward pass.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal, overload

from specheads.decoding.batching import BatchDecoder, failed, plain_torch
from specheads.decoding.drafting import Autoregressive, Drafting, check_pairing
from specheads.decoding.engine import Engine, Engines, make_engine
from specheads.decoding.records import CHAIN, Generation
from specheads.decoding.request import (
    Prompt,
    Request,
    StopTokens,
    checked_number,
    checked_stop_tokens,
    checked_window,
)
from specheads.decoding.rounds import ChainRounds, RoundParts, Rounds, TargetRounds
from specheads.decoding.step_inputs import DraftMemory
from specheads.decoding.stopping import MAX_TOKENS, FixedLength, HeadThreshold, StoppingRule
from specheads.decoding.text_stream import TextStream
from specheads.decoding.verification import (
    BlockVerification,
    TokenVerification,
    Verification,
    VerificationRule,
)
from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead
from specheads.pair.generation_config import TargetWarp
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp

logger = logging.getLogger(__name__)

# What a head may recommend.
VERIFICATIONS: dict[str, type[VerificationRule]] = {
    rule.name: rule for rule in (TokenVerification, BlockVerification)
}
# Tokens of a batch's drafts: a compiler can then be shown a number of them that is no other size
LEAST_DRAFTED = 10
Step = Callable[[], None]


class BatchError(UserError):
    """Prompts of a batch that failed.

    `generations` has the responses to the others, by the number of the prompt.
    """

    def __init__(self, message: str, generations: Mapping[int, Generation]) -> None:
        super().__init__(message)
        self.generations = generations


_KINDS = {  # of a decoder's arguments, with examples
    "pair": (Pair, 'specheads.load_pair("nano")'),
    "drafting": (Drafting, "specheads.drafting.Autoregressive()"),
    "stopping": (
        StoppingRule,
        "specheads.stopping.FixedLength(5), or HeadThreshold(head) for a head",
    ),
    "verification": (Verification, "specheads.verification.BlockVerification()"),
    "head": (AcceptanceHead, "specheads.load_head(folder)"),
    "warp": (Warp, "specheads.Warp(temperature=1.0)"),
}


def _check_choices(choices: Mapping[str, object], needed: str = "pair") -> None:
    """Raise UserError for an argument of a decoder of another type; all but `needed` may be
    None.
    """
    for name in choices.keys() & _KINDS.keys():
        kind, example = _KINDS[name]
        value = choices[name]
        if isinstance(value, kind) or (value is None and name != needed):
            continue
        raise UserError(f"{name}={value!r} must be a {kind.__name__}, for example {example}.")


class ResponseStream(Iterator[str]):
    """The text of a response, piece by piece while it is decoded."""

    def __init__(self, pieces: Generator[str], result: Callable[[], Generation]) -> None:
        self._pieces = pieces
        self._result = result
        self._generation: Generation | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration:
            if self._generation is None:
                self._generation = self._result()
            raise

    def close(self) -> None:
        """End the response here."""
        self._pieces.close()

    @property
    def generation(self) -> Generation:
        """The whole response with its rounds. Raises UserError before it has ended."""
        if self._generation is None:
            raise UserError("the response has not ended; read its pieces to the end first.")
        return self._generation


class Decoder:
    """What all decoders can do with requests.

    A copy, also by pickle, is a new decoder with the same choices.
    """

    pair: Pair
    single: BatchDecoder  # decodes one prompt at a time
    _batch: BatchDecoder | None = None  # it has memory for one number of rows at a time
    _choices: Mapping[str, Any]  # the arguments of the constructor

    def __reduce__(self) -> tuple[Callable[[], "Decoder"], tuple[()]]:
        return partial(type(self), **self._choices), ()

    def __repr__(self) -> str:
        shown = [self.pair.name]
        for name, value in self._choices.items():
            if name != "pair" and value is not None:
                shown.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def is_warm(self) -> bool:
        """Whether the next generation compiles, loads or captures nothing."""
        return self.single.is_warm

    def warm_up(self) -> float:
        """Compile, load or capture all that generation will run; return the seconds.

        The first generation does it otherwise.
        """
        start = time.perf_counter()
        self.single.warm_up()
        return time.perf_counter() - start

    def prepare(self) -> None:
        """Prepare all that generation will run, one step after another."""
        self.single.prepare()

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        seed: int = 0,
        stop_tokens: StopTokens = None,
    ) -> Generation:
        """Return the response to `prompt`: ids (T,), a string, or chat messages.

        Args:
            max_new_tokens: the response ends there at the latest, or at the end of the models'
                window.
            seed: of everything random in this generation.
            stop_tokens: an id or ids that end the response; default: the target's generation
                config.
        """
        request = self._request(prompt, max_new_tokens, seed, stop_tokens)
        for _ in self.single.decode([request], request.stop_tokens):
            pass
        return self.single.generation(request)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        seed: int = 0,
        stop_tokens: StopTokens = None,
    ) -> ResponseStream:
        """Return the response's text piece by piece, whole characters only.

        Until its end nothing else decodes here.
        """
        request = self._request(prompt, max_new_tokens, seed, stop_tokens)
        return ResponseStream(self._pieces(request), partial(self.single.generation, request))

    @overload
    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        *,
        max_batch: int = ...,
        max_new_tokens: int = ...,
        seeds: int | Sequence[int] = ...,
        stop_tokens: StopTokens = ...,
        as_completed: Literal[False] = ...,
    ) -> list[Generation]: ...

    @overload
    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        *,
        max_batch: int = ...,
        max_new_tokens: int = ...,
        seeds: int | Sequence[int] = ...,
        stop_tokens: StopTokens = ...,
        as_completed: Literal[True],
    ) -> Iterator[tuple[int, Generation]]: ...

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        *,
        max_batch: int = 8,
        max_new_tokens: int = 256,
        seeds: int | Sequence[int] = 0,
        stop_tokens: StopTokens = None,
        as_completed: bool = False,
    ) -> list[Generation] | Iterator[tuple[int, Generation]]:
        """Return the responses in the order of `prompts`, or yield `(number, generation)` as each
        ends.

        Up to `max_batch` prompts are decoded together; one that ends makes room for the next. The
        tokens of each are those that `generate` returns, up to the rounding of sums.

        Args:
            prompts: each as for `generate`; all are checked before the first is decoded.
            max_batch: rows of KV cache, which are allocated once for each number.
            seeds: one for each prompt; or that of the first, and the prompts after it have the next
                numbers.
            as_completed: yield responses as they end, and read prompts as there is room; until the
                batch ends or is closed, nothing else decodes here.

        Raises:
            UserError: a choice that decodes one prompt at a time; prompts that cannot be decoded,
                which are named after the others have ended where these are yielded.
            BatchError: prompts that failed while they were decoded; it has the others' responses.
        """
        checked_number("max_batch", max_batch)
        max_new_tokens = checked_number("max_new_tokens", max_new_tokens)
        stop = checked_stop_tokens(stop_tokens)
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise UserError(
                f"prompts={prompts!r} must be a list of prompts; put a single one into a list, or"
                " use generate."
            )
        if isinstance(seeds, Iterable):
            prompts = list(prompts)
            seeds = list(seeds)
            numbers: Iterable[int] = seeds
            if len(seeds) != len(prompts):
                raise UserError(
                    f"seeds has {len(seeds)} numbers for {len(prompts)} prompts; give one for each,"
                    " or the first."
                )
        else:
            numbers = count(checked_number("seeds", seeds, 0))
        batch = self.single if max_batch == 1 else self._batch_of(max_batch)
        failures: dict[int, str] = {}
        requests = batch.requests(prompts, max_new_tokens, numbers, stop, failures)
        if as_completed:
            return batch.generate(requests, stop, failures)
        waiting = list(requests)
        if failures:
            raise failed(failures)
        made: dict[int, Generation] = {}
        try:
            made.update(batch.generate(waiting, stop, failures))
        except UserError as error:
            raise BatchError(str(error), made) from None
        return [made[request.number] for request in waiting]

    @plain_torch()
    def _batch_of(self, num_rows: int) -> BatchDecoder:
        if self._batch is None or self._batch.num_rows != num_rows:
            self._batch = BatchDecoder(self.pair, self._batch_rounds(num_rows))
        return self._batch

    def _batch_rounds(self, num_rows: int) -> Rounds:
        raise NotImplementedError

    def _request(
        self, prompt: Prompt, max_new_tokens: int, seed: int, stop_tokens: StopTokens
    ) -> Request:
        stop = checked_stop_tokens(stop_tokens)
        request = self.single.request(0, prompt, max_new_tokens, seed, stop)
        if not self.is_warm:
            self.warm_up()
        return request

    def _pieces(self, request: Request) -> Generator[str]:
        stream = TextStream(self.pair)
        for _ in self.single.decode([request], request.stop_tokens):
            if request.failure is not None:
                raise UserError(request.failure)
            has_ended = request.finish_reason is not None
            if piece := stream.next_piece(request.response, has_ended):
                yield piece


class SpeculativeDecoder(Decoder):
    """A pair, and one choice on each axis.

    Args:
        drafting: how tokens are proposed; default a chain.
        stopping: when a draft is long enough; default the verification rule's stopping rule, or
            five tokens.
        verification: how much of a draft is accepted; default token verification for chains, and
            for others what the drafting method names.
        warp: temperature, top-k, top-p, min-p of both models; default those of the target's
            generation config, or all tokens at temperature 1.
        engine: `auto`, `eager`, `compiled` or `cuda_graph`.
        window: positions of KV cache, for prompt and response together; default those that the
            target reaches, at most MAX_WINDOW. Beyond those of the draft, the target goes on alone;
            trees end there.
    """

    @plain_torch()
    def __init__(
        self,
        pair: Pair,
        drafting: Drafting | None = None,
        stopping: StoppingRule | None = None,
        verification: Verification | None = None,
        warp: Warp | None = None,
        engine: str = "auto",
        window: int | None = None,
    ) -> None:
        self._choices = {
            "pair": pair,
            "drafting": drafting,
            "stopping": stopping,
            "verification": verification,
            "warp": warp,
            "engine": engine,
            "window": window,
        }
        _check_choices(self._choices)
        self.drafting = drafting or Autoregressive()
        self.pair = pair = self.drafting.pair(pair)
        layers = self._layers_to_read()
        self.verification = verification or self.drafting.usual_verification()
        check_pairing(self.drafting, self.verification)
        self.stopping = stopping or self.verification.stopping or FixedLength()
        self.warp = warp or TargetWarp(top_k=0).of(pair)
        self._engine_name = engine
        window = checked_window(pair, window)
        draft_window = min(window, pair.draft_lm.window)
        if self.drafting.reads_draft and draft_window < window:
            is_chain = self.drafting.kind == CHAIN
            logger.warning(
                "the draft %s reads %d positions, the target %d: %s",
                pair.draft_id,
                draft_window,
                window,
                "the target goes on alone after them" if is_chain else "texts end there",
            )
            window = window if is_chain else draft_window
        self._longest = max(self.stopping.max_tokens, MAX_TOKENS)
        spare = self.drafting.most_verified(self._longest)
        self.target_engine = make_engine(engine, pair.target_lm, window, spare, layers=layers)
        self.engines = Engines((self.target_engine,))
        # The engine that runs the draft, or the target's if no draft is run.
        self.draft_engine = self.target_engine
        if self.drafting.reads_draft:
            spare = self.drafting.most_read(self._longest)
            self.draft_engine = make_engine(engine, pair.draft_lm, draft_window, spare)
            self.engines = Engines((self.target_engine, self.draft_engine))
        # Decoders that share engines share these, too.
        # By the length of the longest draft, and whether tokens are only compared
        self._memories: dict[tuple[int, bool], DraftMemory] = {}
        self._row_engines: dict[int, Engines] = {}  # the key is the number of rows
        self._bind()

    def _layers_to_read(self) -> tuple[int, ...]:
        """Return the layers of the target whose inputs the draft reads.

        Raises UserError for a way of drafting, a device or a target, with which it cannot.
        """
        pair = self.pair
        layers = pair.draft_lm.reads_layers
        if not layers or not self.drafting.reads_draft:
            return ()
        if not self.drafting.reads_states:
            raise UserError(
                f"{self.drafting!r} is made for drafts that read tokens alone, but {pair.draft_id}"
                " reads the target's states; use drafting=autoregressive."
            )
        if (device := pair.draft_lm.device) != pair.target_lm.device:
            raise UserError(
                f"the draft {pair.draft_id} reads the target's states, but it is on {device}, and"
                f" the target on {pair.target_lm.device}; put both on one device."
            )
        pair.target_lm.check_inputs(layers)
        return layers

    @classmethod
    def recommended(cls, pair: Pair, head: AcceptanceHead, **choices: Any) -> "SpeculativeDecoder":
        """Return a decoder with the rules that `specheads evaluate` found best for a head and
        stored in it.

        `choices` are warp, engine and window. Raises UserError if none is stored, or if another
        setting is recommended, which it names.
        """
        _check_choices({"head": head}, needed="head")
        stopping, verification = recommended_rules(head)
        return cls(pair, stopping=stopping, verification=verification, **choices)

    def with_stopping(
        self, stopping: StoppingRule, verification: Verification | None = None
    ) -> "SpeculativeDecoder":
        """Return a decoder with other rules that shares this one's memory.

        Only one of them may be decoding at a time.
        """
        changed = {"stopping": stopping, "verification": verification or self.verification}
        _check_choices(changed, needed="stopping")
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **changed)
        other._choices = {**self._choices, **changed}
        check_pairing(self.drafting, other.verification)
        drafting = self.drafting
        longest = max(stopping.max_tokens, self._longest)
        reads_more = drafting.most_read(longest) > drafting.most_read(self._longest)
        verifies_more = drafting.most_verified(longest) > drafting.most_verified(self._longest)
        if drafting.kind != CHAIN and (reads_more or verifies_more):
            raise UserError(
                f"{type(stopping).__name__} drafts up to {stopping.max_tokens} tokens, but this"
                f" decoder has memory for paths of {self._longest}; make it with that rule."
            )
        other._bind()
        return other

    def prepare_repeated(self, verified: Sequence[int] = ()) -> None:
        """Prepare `draft_steps`, and the `verification_step` of these numbers of drafted tokens.

        Generation needs more. Raises UserError for drafts that are not chains.
        """
        self._chains()
        self.single.prepare_repeated(verified)

    def draft_steps(self, count: int, context: int) -> Step:
        """Return a call that runs `count` draft steps in a row as rounds do, after `context`
        positions.

        Prepare it first. Raises UserError for drafts that are not chains.
        """
        return _at(self.draft_engine, context, self._chains().drafter.repeated_steps(count))

    def verification_step(self, num_drafted: int, context: int) -> Step:
        """Return a call that verifies `num_drafted` tokens as rounds do, after `context` positions.

        Prepare it first. Raises UserError for drafts that are not chains.
        """
        return _at(self.target_engine, context, self._chains().repeated_verification(num_drafted))

    def _chains(self) -> ChainRounds:
        if not isinstance(self.single.rounds, ChainRounds):
            raise UserError(f"{self.drafting!r} drafts no chains, whose steps alone can be timed.")
        return self.single.rounds

    @plain_torch()
    def _bind(self) -> None:
        self.stopping.bind(self.pair, self.draft_engine.lm.device)
        # Capacity for the longest draft, and at least what most rules need: few sizes mean few
        # compiled steps.
        most = self.target_engine.padded(max(self.stopping.max_tokens, MAX_TOKENS) + 1) - 1
        key = most, self._only_compares
        if key not in self._memories:
            self._memories[key] = self._memory(most, 1)
        self.single = BatchDecoder(self.pair, self._rounds(self.engines, self._memories[key]))
        self._batch = None

    @property
    def _only_compares(self) -> bool:
        """Whether verification needs no distributions."""
        return self.warp.greedy and self.verification.compares

    def _memory(self, most: int, num_rows: int) -> DraftMemory:
        draft = self.pair.draft_lm
        return DraftMemory(
            most,
            draft.vocab_size,
            draft.probs_dtype,
            self.draft_engine.lm.device,
            num_rows,
            only_compared=self._only_compares,
        )

    def _rounds(self, engines: Engines, memory: DraftMemory) -> Rounds:
        return self.drafting.rounds(
            RoundParts(self.pair, engines, self.stopping, self.verification, self.warp, memory)
        )

    def _batch_rounds(self, num_rows: int) -> Rounds:
        engines = self._engines_of(num_rows)
        most = max(LEAST_DRAFTED, engines.target.padded(self.stopping.max_tokens + 1) - 1)
        return self._rounds(engines, self._memory(most, num_rows + 1))

    def _engines_of(self, num_rows: int) -> Engines:
        if num_rows not in self._row_engines:
            self._row_engines.clear()  # memory of one size at a time
            self._row_engines[num_rows] = Engines(
                make_engine(
                    self._engine_name,
                    engine.lm,
                    engine.capacity,
                    num_rows=num_rows + 1,
                    layers=engine.layers,
                )
                for engine in self.engines
            )
        return self._row_engines[num_rows]


class Baseline(Decoder):
    """The target alone, one token per forward pass, with the engine and the warping of speculative
    decoding.
    """

    @plain_torch()
    def __init__(
        self,
        pair: Pair,
        warp: Warp | None = None,
        engine: str | Engine = "auto",
        window: int | None = None,
    ) -> None:
        self._engine_name = engine if isinstance(engine, str) else "auto"
        self._choices = {"pair": pair, "warp": warp, "engine": self._engine_name, "window": window}
        _check_choices(self._choices)
        self.pair = pair
        self.warp = warp or TargetWarp(top_k=0).of(pair)
        if isinstance(engine, str):
            engine = make_engine(engine, pair.target_lm, checked_window(pair, window))
        self.engine = engine
        self._rounds = TargetRounds(pair.target_id, self.engine, self.warp)
        self.single = BatchDecoder(pair, self._rounds)

    def target_step(self, context: int) -> Step:
        """Return a call that decodes one token as rounds do, after `context` positions.

        Prepare the decoder first.
        """
        return _at(self.engine, context, self._rounds.repeated_step())

    def _batch_rounds(self, num_rows: int) -> Rounds:
        engine = make_engine(
            self._engine_name, self.pair.target_lm, self.engine.capacity, num_rows=num_rows + 1
        )
        return TargetRounds(self.pair.target_id, engine, self.warp)


def _at(engine: Engine, context: int, run: Callable[[], object]) -> Step:
    """Return a step that runs as if `context` positions were in memory."""

    def step() -> None:
        engine.pretend(context)
        run()

    return step


def generate_baseline(
    pair: Pair,
    prompt: Prompt,
    max_new_tokens: int = 256,
    seed: int = 0,
    warp: Warp | None = None,
    engine: str = "auto",
    stop_tokens: StopTokens = None,
) -> Generation:
    """Return the target's response to `prompt`, decoded without a draft by the engine and the
    warping of speculative decoding.
    """
    return Baseline(pair, warp, engine).generate(prompt, max_new_tokens, seed, stop_tokens)


def recommended_rules(head: AcceptanceHead) -> tuple[HeadThreshold, VerificationRule]:
    """Return the rules that a head recommends.

    Raises UserError if it recommends nothing or a setting without it, or a verification that is not
    known.
    """
    values = head.config.recommended or {}
    if "threshold" not in values:
        raise UserError(
            "the head recommends no setting: specheads evaluate head=<folder> stores one; or choose"
            " one yourself, for example stopping=HeadThreshold(head, 0.5)."
        )
    use = values.get("use")
    if use != values.get("setting"):
        raise UserError(
            f"the head's evaluation recommends {use}, not this head; decode with that rule"
            " (specheads.stopping), or with this head at its best threshold by"
            ' stopping=HeadThreshold(head, threshold="auto").'
        )
    verification = values.get("verification", TokenVerification.name)
    if verification not in VERIFICATIONS:
        raise UserError(
            f"the head recommends verification={verification!r}; expected one of"
            f" {', '.join(VERIFICATIONS)}."
        )
    rule = HeadThreshold(
        head, values["threshold"], values.get("min_tokens"), values.get("max_tokens", MAX_TOKENS)
    )
    return rule, VERIFICATIONS[verification]()
