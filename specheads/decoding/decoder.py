"""Decoders: speculative decoding with one choice on each axis, and the target alone.

They know no strategy by name.

Positions in memory trail the committed text: the target always has all but the last committed
token, the draft has at most that, and reads the missing ones first in its next forward pass.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal, overload

from specheads.decoding.drafting import Autoregressive, Drafting, check_pairing
from specheads.decoding.engine import Engine, make_engine
from specheads.decoding.records import CHAIN, Generation
from specheads.decoding.rounds import ChainRounds, RoundParts, TargetRounds
from specheads.decoding.rows import (
    Prompt,
    Rounds,
    Row,
    RowsDecoder,
    StopTokens,
    checked_number,
    checked_stop_tokens,
    checked_window,
    failed,
    plain_torch,
)
from specheads.decoding.step_inputs import DraftMemory
from specheads.decoding.stopping import MAX_TOKENS, FixedLength, HeadThreshold, StoppingRule
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


def _checked_choices(needed: str = "pair", **choices: Any) -> dict[str, Any]:
    """Return the arguments of a decoder, all but the `needed` one may be None.

    Raises UserError for one of another type.
    """
    for name in choices.keys() & _KINDS.keys():
        kind, example = _KINDS[name]
        if not isinstance(choices[name], kind) and (choices[name] is not None or name == needed):
            raise UserError(
                f"{name}={choices[name]!r} must be a {kind.__name__}, for example {example}."
            )
    return choices


class Decoder:
    """What all decoders can do with rows of their rounds.

    A copy, also by pickle, is a new decoder with the same choices.
    """

    pair: Pair
    single: RowsDecoder  # decodes one prompt at a time
    _batch: RowsDecoder | None = None  # it has memory for one number of rows at a time
    _choices: Mapping[str, Any]  # the arguments of the constructor

    def __reduce__(self) -> Any:
        return partial(type(self), **self._choices), ()

    def __repr__(self) -> str:
        pair, *others = (
            (name, value) for name, value in self._choices.items() if value is not None
        )
        return f"{type(self).__name__}({pair[1].name}{''.join(f', {name}={value!r}' for name, value in others)})"

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
        row = self._row(prompt, max_new_tokens, seed, stop_tokens)
        for _ in self.single.decode([row], row.stop_tokens):
            pass
        return row.generation(self.pair)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        seed: int = 0,
        stop_tokens: StopTokens = None,
    ) -> Iterator[str]:
        """Yield the response's text piece by piece, whole characters only.

        Until its end nothing else decodes here.
        """
        return self._pieces(self._row(prompt, max_new_tokens, seed, stop_tokens))

    @overload
    def generate_batch(self, prompts: Iterable[
        Prompt
    ], *, max_batch: int = ..., max_new_tokens: int = ..., seeds: (
        int | Sequence[int]
    ) = ..., stop_tokens: StopTokens = ..., as_completed: Literal[
        False
    ] = ...,
    ) -> list[Generation]: ...  # fmt: skip

    @overload
    def generate_batch(self, prompts: Iterable[
        Prompt
    ], *, max_batch: int = ..., max_new_tokens: int = ..., seeds: (
        int | Sequence[int]
    ) = ..., stop_tokens: StopTokens = ..., as_completed: Literal[
        True
    ],
    ) -> Iterator[tuple[int, Generation]]: ...  # fmt: skip

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
            max_batch: rows of KV memory, which are allocated once for each number.
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
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise UserError(
                f"prompts={prompts!r} must be a list of prompts; put a single one into a list, or"
                " use generate."
            )
        if isinstance(seeds, Iterable):
            prompts = list(prompts)
            seeds = list(seeds)
            if len(seeds) != len(prompts):
                raise UserError(
                    f"seeds has {len(seeds)} numbers for {len(prompts)} prompts; give one for each,"
                    " or the first."
                )
        rows = self.single if max_batch == 1 else self._batch_of(max_batch)
        stop = checked_stop_tokens(stop_tokens)
        failures: dict[int, str] = {}
        numbers = seeds if isinstance(seeds, list) else count(checked_number("seeds", seeds, 0))
        opened: Iterable[Row] = rows.opened(
            prompts, checked_number("max_new_tokens", max_new_tokens), numbers, stop, failures
        )
        if as_completed:
            return rows.generate(opened, stop, failures)
        waiting = list(opened)
        if failures:
            raise failed(failures)
        made: dict[int, Generation] = {}
        try:
            made.update(rows.generate(waiting, stop, failures))
        except UserError as error:
            raise BatchError(str(error), made) from None
        return [made[row.number] for row in waiting]

    @plain_torch()
    def _batch_of(self, num_rows: int) -> RowsDecoder:
        if self._batch is None or self._batch.num_rows != num_rows:
            self._batch = RowsDecoder(self.pair, self._batch_rounds(num_rows))
        return self._batch

    def _batch_rounds(self, num_rows: int) -> Rounds:
        raise NotImplementedError

    def _row(self, prompt: Prompt, max_new_tokens: int, seed: int, stop_tokens: StopTokens) -> Row:
        row = self.single.row(0, prompt, max_new_tokens, seed, checked_stop_tokens(stop_tokens))
        if not self.is_warm:
            self.warm_up()
        return row

    def _pieces(self, row: Row) -> Iterator[str]:
        shown = read = (
            # Tokens before `shown` are out; [shown, read) decoded to the text that the next piece
            # extends
            0
        )
        for _ in self.single.decode([row], row.stop_tokens):
            if row.failure is not None:
                raise UserError(row.failure)
            response = row.response
            before = self.pair.decode(response[shown:read])
            text = self.pair.decode(response[shown:])
            # A replacement character at the end is a character whose remaining bytes are still to
            # come.
            if len(text) > len(before) and (not text.endswith("\ufffd") or row.finish_reason):
                yield text[len(before) :]
                shown = read
                read = len(response)


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
        window: positions of KV memory, for prompt and response together; default those that the
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
        self._choices = _checked_choices(
            pair=pair,
            drafting=drafting,
            stopping=stopping,
            verification=verification,
            warp=warp,
            engine=engine,
            window=window,
        )
        self.drafting = drafting or Autoregressive()
        self.pair = pair = self.drafting.pair(pair)
        self.verification = verification or self.drafting.usual_verification()
        check_pairing(self.drafting, self.verification)
        self.stopping = stopping or self.verification.stopping or FixedLength()
        self.warp = warp or TargetWarp(top_k=0).of(pair)
        self._engine_name = engine
        window = checked_window(pair, window)
        reach = min(window, pair.draft_lm.window) if self.drafting.reads_draft else window
        if reach < window:
            how = (
                "texts end there"
                if self.drafting.kind != CHAIN
                else "the target goes on alone after them"
            )
            logger.warning(
                "the draft %s reads %d positions, the target %d: %s",
                pair.draft_id,
                reach,
                window,
                how,
            )
            window = reach if self.drafting.kind != CHAIN else window
        self._longest = max(self.stopping.max_tokens, MAX_TOKENS)
        target_engine = make_engine(
            engine, pair.target_lm, window, self.drafting.most_verified(self._longest)
        )
        self.engines: list[Engine] = [target_engine]
        if self.drafting.reads_draft:
            self.engines.append(
                make_engine(engine, pair.draft_lm, reach, self.drafting.most_read(self._longest))
            )
        # Decoders that share engines share these, too.
        self._memories: dict[int, DraftMemory] = {}  # the key is the length of the longest draft
        self._row_engines: dict[int, list[Engine]] = {}  # the key is the number of rows
        self._bind()

    @classmethod
    def recommended(cls, pair: Pair, head: AcceptanceHead, **choices: Any) -> "SpeculativeDecoder":
        """Return a decoder with the rules that `specheads evaluate` found best for a head and
        stored in it.

        `choices` are warp, engine and window. Raises UserError if none is stored, as something else
        was faster for example.
        """
        _checked_choices("head", head=head)
        stopping, verification = recommended_rules(head)
        return cls(pair, stopping=stopping, verification=verification, **choices)

    def with_stopping(
        self, stopping: StoppingRule, verification: Verification | None = None
    ) -> "SpeculativeDecoder":
        """Return a decoder with other rules that shares this one's memory.

        Only one of them may be decoding at a time.
        """
        _checked_choices("stopping", stopping=stopping, verification=verification)
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._choices = {
            **self._choices,
            "stopping": stopping,
            "verification": verification or self.verification,
        }
        other.stopping = stopping
        other.verification = verification or self.verification
        check_pairing(self.drafting, other.verification)
        drafting = self.drafting
        longest = max(stopping.max_tokens, self._longest)
        if drafting.kind != CHAIN and any(
            nodes(longest) > nodes(self._longest)
            for nodes in (drafting.most_read, drafting.most_verified)
        ):
            raise UserError(
                f"{type(stopping).__name__} drafts up to {stopping.max_tokens} tokens, but this"
                f" decoder has memory for paths of {self._longest}; make it with that rule."
            )
        other._bind()
        return other

    def draft_steps(self, count: int, context: int) -> Step:
        """Return a call that runs `count` draft steps in a row as rounds do, after `context` positions.

        Prepare the decoder first. Raises UserError for drafts that are not chains.
        """
        return _at(self.draft_engine, context, self._chains().drafter.repeated_steps(count))

    def verification_step(self, num_drafted: int, context: int) -> Step:
        """Return a call that verifies `num_drafted` tokens as rounds do, after `context` positions.

        Prepare the decoder first. Raises UserError for drafts that are not chains.
        """
        return _at(self.target_engine, context, self._chains().repeated_verification(num_drafted))

    def _chains(self) -> ChainRounds:
        if not isinstance(self.single.rounds, ChainRounds):
            raise UserError(f"{self.drafting!r} drafts no chains, whose steps alone can be timed.")
        return self.single.rounds

    @property
    def target_engine(self) -> Engine:
        return self.engines[0]

    @property
    def draft_engine(self) -> Engine:
        """The engine that runs the draft, or the target's if no draft is run."""
        return self.engines[-1]

    @plain_torch()
    def _bind(self) -> None:
        self.stopping.bind(self.pair, self.draft_engine.lm.device)
        # Capacity for the longest draft, and at least what most rules need: few sizes mean few
        # compiled steps.
        most = self.target_engine.padded(max(self.stopping.max_tokens, MAX_TOKENS) + 1) - 1
        if most not in self._memories:
            self._memories[most] = self._memory(most, 1)
        self.single = RowsDecoder(self.pair, self._rounds(self.engines, self._memories[most]))
        self._batch = None

    def _memory(self, most: int, num_rows: int) -> DraftMemory:
        draft = self.pair.draft_lm
        return DraftMemory(
            most, draft.vocab_size, draft.probs_dtype, self.draft_engine.lm.device, num_rows
        )

    def _rounds(self, engines: Sequence[Engine], memory: DraftMemory) -> Rounds:
        return self.drafting.rounds(
            RoundParts(self.pair, engines, self.stopping, self.verification, self.warp, memory)
        )

    def _batch_rounds(self, num_rows: int) -> Rounds:
        engines = self._engines_of(num_rows)
        most = max(LEAST_DRAFTED, engines[0].padded(self.stopping.max_tokens + 1) - 1)
        return self._rounds(engines, self._memory(most, num_rows + 1))

    def _engines_of(self, num_rows: int) -> list[Engine]:
        if num_rows not in self._row_engines:
            self._row_engines.clear()  # memory of one size at a time
            self._row_engines[num_rows] = [
                make_engine(self._engine_name, engine.lm, engine.capacity, num_rows=num_rows + 1)
                for engine in self.engines
            ]
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
        self._choices = _checked_choices(
            pair=pair, warp=warp, engine=self._engine_name, window=window
        )
        self.pair = pair
        self.warp = warp or TargetWarp(top_k=0).of(pair)
        self.engine = (
            make_engine(engine, pair.target_lm, checked_window(pair, window))
            if isinstance(engine, str)
            else engine
        )
        self._rounds = TargetRounds(pair.target_id, self.engine, self.warp)
        self.single = RowsDecoder(pair, self._rounds)

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

    Raises UserError if it recommends nothing, or a verification that is not known.
    """
    values = head.config.recommended or {}
    if "threshold" not in values:
        raise UserError(
            "the head recommends no setting: specheads evaluate head=<folder> stores one, unless"
            " something else was faster; choose one yourself, for example"
            " stopping=HeadThreshold(head, 0.5)."
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
