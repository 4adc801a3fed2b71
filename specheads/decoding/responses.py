"""Responses of the target to many prompts: rows of one memory, in which the next prompt follows a
response that has ended.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specheads.decoding.engine import (
    CompiledEngine,
    Engine,
    bytes_to_pack,
    make_engine,
    resolve_engine,
)
from specheads.decoding.rounds import TargetRounds
from specheads.decoding.rows import Row, RowsDecoder
from specheads.decoding.step_inputs import TOGETHER
from specheads.errors import UserError, is_out_of_memory
from specheads.pair.language_model import LanguageModel
from specheads.pair.needs import memory_parts
from specheads.pair.padding import by_length
from specheads.pair.pair import Pair
from specheads.pair.sampling import GivenUniforms, Warp
from specheads.prompts.prompt import ResponseLimits
from specheads.storage.journal import Journal

logger = logging.getLogger(__name__)

# Tokens times weights. Compiling takes five seconds, twenty with the operators, which are kept;
# plain PyTorch needs about ten for this much: 8,000 tokens of a model of SMALL weights. In 16 bits
# larger models take minutes to
# compile, so they count as small.
SMALL = 5e6
WORK_WORTH_COMPILING = 4e10
COMPILER_BYTES = 150e6  # of the compiler's modules, and of steps
SHARED_BYTES = 2**31  # of KV memory, up to which it is made larger than it need be

KEPT_SECONDS = 30.0  # of work on responses that a killed process loses

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class Response:
    """A response: `ids` with the stop token, if there is one; `finished` says whether there is."""

    ids: list[int]
    finished: bool


def row_uniforms(
    seed: int, prompt_id: str, max_new_tokens: int, num_samples: int = 1, response: int = 0
) -> np.ndarray:
    """Return (1 + num_samples, max_new_tokens) uniform numbers for the tokens of a prompt's
    response, and for drafted ones.
    """
    seeds = [seed, int(prompt_id, 16)] + ([0, response] if response else [])
    return np.random.default_rng(seeds).random((1 + num_samples, max_new_tokens))


def _engine_worth(num_tokens: int, num_weights: float) -> str:
    """Return the name of the engine for `num_tokens` tokens: `auto`, or `eager` where compiling
    would not pay.
    """
    name = resolve_engine("auto")
    return "eager" if name == "auto" and num_tokens * num_weights < WORK_WORTH_COMPILING else name


def _shared_capacity(capacity: int, num_rows: int, lm: LanguageModel) -> int:
    """Return the positions to allocate for `capacity`: few sizes on a CPU, as sets of prompts share
    what is compiled for one.
    """
    # spare: what an engine adds
    spare = 2 * CompiledEngine.bucket
    config = lm.config
    shared = (1 << (capacity + spare - 1).bit_length()) - spare
    numbers = (
        2 * config.num_hidden_layers * config.hidden_size * lm.output_embedding.weight.itemsize
    )  # at most, of a position
    return (
        shared
        if lm.device.type == "cpu" and num_rows * shared * numbers <= SHARED_BYTES
        else capacity
    )


def _key(prompt: Sequence[int], uniform: np.ndarray, warp: Warp) -> str:
    """Return the name of a response: a hash of what decides it besides the model."""
    return hashlib.sha256(
        repr(([int(token) for token in prompt], warp)).encode() + uniform.tobytes()
    ).hexdigest()[:16]


class _Kept:
    """What has been made of responses, by their numbers, in memory and in a journal if there is
    one.
    """

    def __init__(self, path: Path | None, keys: Sequence[str]) -> None:
        self._keys = keys
        self._rows = list[Row]()
        self._due = time.perf_counter() + KEPT_SECONDS
        self._journal = None if path is None else Journal(path, {})
        known = {} if self._journal is None else self._journal.entries
        entries = {number: known[key] for number, key in enumerate(keys) if key in known}
        self.ended = {
            number: Response(**entry)
            for number, entry in entries.items()
            if entry["finished"] is not None
        }
        self.begun = {
            number: entry["ids"] for number, entry in entries.items() if number not in self.ended
        }

    def keep(self, rows: Sequence[Row]) -> None:
        """Keep the tokens of rows, in the journal those of rows that have ended, and of the others
        now and then.
        """
        is_due = time.perf_counter() >= self._due
        self._rows = list(rows)
        for row in rows:
            if row.has_ended:
                self.ended[row.number] = Response(self._ids(row), row.finish_reason == "stop")
            if self._journal is not None and (row.has_ended or is_due):
                finished = row.finish_reason == "stop" if row.has_ended else None
                self._journal.add(
                    self._keys[row.number], {"ids": self._ids(row), "finished": finished}
                )
        if is_due:
            self._due = time.perf_counter() + KEPT_SECONDS

    def begin_again(self) -> None:
        """Let the rows in progress begin after the tokens that they have."""
        self.begun |= {row.number: self._ids(row) for row in self._rows if not row.has_ended}
        self._rows = []

    def _ids(self, row: Row) -> list[int]:
        return self.begun.get(row.number, []) + row.response


class Responder:
    """Makes responses.

    Memory is allocated at the first, for as many positions as the longest can need.
    """

    def __init__(
        self, pair: Pair, lengths: Sequence[int], limits: ResponseLimits, engine: str | None = None
    ) -> None:
        """Plan responses of the target to prompts of these lengths, which decide the engine by
        default.
        """
        self.pair = pair
        self._limits = limits
        self._lm = pair.target_lm
        self._num_tokens = sum(
            min(limits.max_new_tokens, pair.window - length) for length in lengths
        )
        num_weights = (
            self._lm.model.num_parameters()
            if self._lm.output_embedding.weight.dtype.itemsize > 2
            else SMALL
        )
        self._engine_name = engine or _engine_worth(self._num_tokens, num_weights)
        self.capacity = min(
            pair.window,
            _shared_capacity(max(lengths) + limits.max_new_tokens, limits.batch_size, self._lm),
        )
        self._num_rows = min(limits.batch_size, len(lengths))
        self._engine: Engine | None = None
        self._decoders: dict[Warp, RowsDecoder] = {}
        self._made = self._finished = (
            0  # tokens, and stop tokens among them: how long responses are expected to be
        )

    def memory(self) -> dict[str, float]:
        """Return the bytes that the first responses allocate, by name."""
        lm = self._lm
        is_eager = self._engine_name == "eager"
        positions = (self._num_rows + 1) * (
            self.capacity + (0 if is_eager else 2 * CompiledEngine.bucket)
        )
        parts = memory_parts(lm, positions, TOGETHER, self._num_rows)
        compiled = {"packed copies": bytes_to_pack(lm), "compiler": COMPILER_BYTES}
        return parts | (compiled if lm.device.type == "cpu" and not is_eager else {})

    def respond(
        self,
        prompts: Sequence[Sequence[int]],
        uniform: np.ndarray,
        warp: Warp,
        on_step: OnStep = lambda made, left: None,
        journal: Path | None = None,
        num_later: int = 0,
    ) -> list[Response]:
        """Return the response to each prompt.

        Where memory does not suffice, half as many rows go on together; the responses are the same,
        up to the rounding of sums. Raises UserError where the model's logits have a NaN.

        Args:
            uniform: (B, max_new_tokens) in [0, 1), one number per sampled token.
            on_step: called after each step with the number of tokens it produced, and how many more
                are expected, with those of `num_later` prompts of later calls.
            journal: a file of what has been made, from which a killed process goes on; the caller
                deletes it.
        """
        kept = _Kept(journal, [_key(*each, warp) for each in zip(prompts, uniform, strict=True)])
        if kept.ended or kept.begun:
            how = (
                "responses: %d of %d are taken over from an interrupted run, and %d that it had"
                " begun"
            )
            logger.info(how, len(kept.ended), len(prompts), len(kept.begun))
        while True:
            try:
                for rows in self._rounds(prompts, kept, uniform, warp):
                    kept.keep(rows)
                    self._made += len(rows)
                    self._finished += sum(row.finish_reason == "stop" for row in rows)
                    on_step(
                        len(rows), self._expected(rows, len(prompts) - len(kept.ended) + num_later)
                    )
                return [kept.ended[number] for number in range(len(prompts))]
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self._num_rows == 1:
                    raise
            kept.begin_again()
            before = self._num_rows
            self._num_rows = self._num_rows // 2
            self._engine = None
            self._decoders.clear()
            if self._lm.device.type == "cuda":
                torch.cuda.empty_cache()
            how = "responses: %d rows do not fit into memory; %d are decoded together from here on"
            logger.warning(how, before, self._num_rows)

    def _expected(self, rows: Sequence[Row], num_open: int) -> float:
        """Return how many more tokens are expected of `num_open` responses, some of which are in
        `rows`.
        """
        most = np.array(
            [
                self._limits.max_new_tokens,
                *(row.limit - len(row.committed) for row in rows if not row.has_ended),
            ]
        )
        ends = self._finished / self._made  # how often a token ends a response
        expected = (1 - (1 - ends) ** most) / ends if ends else most
        return float(expected[1:].sum() + (num_open + 1 - len(most)) * expected[0])

    def _rounds(
        self, prompts: Sequence[Sequence[int]], kept: "_Kept", uniform: np.ndarray, warp: Warp
    ) -> Iterator[list[Row]]:
        """Yield, after each round, the rows that took it; raises UserError for one that failed."""
        if len(kept.ended) == len(prompts):
            return
        decoder = self._decoder(warp)
        most = self._limits.max_new_tokens

        def opened() -> Iterator[Row]:
            for number in by_length(
                [len(prompt) for prompt in prompts]
            ):  # steps read as far as their longest row
                if number not in kept.ended:
                    begun = kept.begun.get(number, [])
                    numbers = GivenUniforms(uniform[number, len(begun) :])
                    yield decoder.row(
                        number, [*prompts[number], *begun], most - len(begun), 0, None, numbers
                    )

        for rows in decoder.decode(opened(), None):
            if failures := [row.failure for row in rows if row.failure is not None]:
                raise UserError(failures[0])
            yield rows

    def _decoder(self, warp: Warp) -> RowsDecoder:
        """Return the decoder of a warp; all have the same memory."""
        if self._engine is None:
            how = "responses: %s runs on engine=%s, %d tokens at most"
            logger.info(how, self.pair.target_id, self._engine_name, self._num_tokens)
            self._engine = make_engine(
                self._engine_name, self._lm, self.capacity, num_rows=self._num_rows + 1
            )
        if warp not in self._decoders:
            self._decoders[warp] = RowsDecoder(
                self.pair, TargetRounds(self.pair.target_id, self._engine, warp)
            )
        return self._decoders[warp]
