"""Responses of the target to many prompts, for data and recordings: continuous batches that a
killed process resumes, with the engine and the memory that pay for so many tokens.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.batching import BatchDecoder
from specheads.decoding.engine import (
    CompiledEngine,
    Engine,
    bytes_to_pack,
    make_engine,
    resolve_engine,
)
from specheads.decoding.request import Request
from specheads.decoding.rounds import TargetRounds
from specheads.decoding.step_inputs import TOGETHER
from specheads.errors import is_out_of_memory
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
# larger models take minutes to compile, so they count as small.
SMALL = 5e6
WORK_WORTH_COMPILING = 4e10
COMPILER_BYTES = 150e6  # of the compiler's modules, and of steps
SHARED_BYTES = 2**31  # of KV cache, up to which it is made larger than it need be

KEPT_SECONDS = 30.0  # of work on responses that a killed process loses, where there is a journal

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class Response:
    """A response: `ids` with the stop token, if there is one; `finished` says whether there is.

    `failure` says why there is none, where the model's logits had a NaN.
    """

    ids: list[int]
    finished: bool
    failure: str | None = None
    # (T, H), the target's hidden states that predicted the tokens, on the CPU; None: not kept
    states: Tensor | None = field(default=None, compare=False, repr=False)


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
    spare = 2 * CompiledEngine.bucket  # what an engine adds
    shared = (1 << (capacity + spare - 1).bit_length()) - spare
    config = lm.config
    weight = lm.output_embedding.weight
    bytes_per_position = 2 * config.num_hidden_layers * config.hidden_size * weight.itemsize
    fits = num_rows * shared * bytes_per_position <= SHARED_BYTES
    return shared if lm.device.type == "cpu" and fits else capacity


def _key(prompt: Sequence[int], uniform: np.ndarray, warp: Warp) -> str:
    """Return the name of a response: a hash of what decides it besides the model."""
    return hashlib.sha256(
        repr(([int(token) for token in prompt], warp)).encode() + uniform.tobytes()
    ).hexdigest()[:16]


class _Kept:
    """The tokens of responses by their numbers, in memory and in a journal if there is one."""

    def __init__(self, path: Path | None, keys: Sequence[str]) -> None:
        self._keys = keys
        self._requests: Sequence[Request] = ()  # that took the last round
        self._due = time.perf_counter() + KEPT_SECONDS
        self._journal = None if path is None else Journal(path, {})
        self.ended = dict[int, Response]()
        self.begun = dict[int, list[int]]()
        for number, key in enumerate(keys):
            entry = None if self._journal is None else self._journal.entries.get(key)
            if entry is None:
                continue
            if entry["finished"] is None:
                self.begun[number] = entry["ids"]
            else:
                self.ended[number] = Response(**entry)

    def keep(self, requests: Sequence[Request]) -> None:
        """Keep the tokens of requests that took a round; in the journal those of responses that
        have ended, and of the others now and then.
        """
        is_due = time.perf_counter() >= self._due
        self._requests = requests
        for request in requests:
            ids = self.begun.get(request.number, []) + request.response
            finished = None
            if request.has_ended:
                finished = request.finish_reason == "stop"
                self.ended[request.number] = Response(ids, finished, request.failure)
            if self._journal is not None and (request.has_ended or is_due):
                entry = {"ids": ids, "finished": finished, "failure": request.failure}
                self._journal.add(self._keys[request.number], entry)
        if is_due:
            self._due = time.perf_counter() + KEPT_SECONDS

    def begin_again(self) -> None:
        """Let the requests in progress begin after the tokens that they have."""
        for request in self._requests:
            if not request.has_ended:
                self.begun[request.number] = self.begun.get(request.number, []) + request.response
        self._requests = ()


class _StatesOfRounds:
    """The states that predicted the tokens of responses, as rounds bring them."""

    def __init__(self) -> None:
        self._numbers: list[int] = []  # of the response of each state
        self._parts: list[Tensor] = []

    def add(self, requests: Sequence[Request], states: Tensor | None) -> None:
        """Add the states (N, H) of a round, those of its requests first."""
        assert states is not None, "the rounds of a single row keep no states"
        self._numbers += [request.number for request in requests]
        self._parts.append(states[: len(requests)].to("cpu", copy=True))

    def given_to(self, responses: Sequence[Response]) -> list[Response]:
        """Return the responses, all of which rounds have brought, with their states."""
        numbers = torch.tensor(self._numbers)
        in_order = torch.cat(self._parts)[numbers.argsort(stable=True)]
        by_response = in_order.split(torch.bincount(numbers).tolist())
        pairs = zip(responses, by_response, strict=True)
        return [replace(response, states=states) for response, states in pairs]


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
        self._lm = lm = pair.target_lm
        longest = limits.max_new_tokens
        self._num_tokens = sum(min(longest, pair.window - length) for length in lengths)
        is_wide = lm.output_embedding.weight.dtype.itemsize > 2
        num_weights = lm.model.num_parameters() if is_wide else SMALL
        self._engine_name = engine or _engine_worth(self._num_tokens, num_weights)
        shared = _shared_capacity(max(lengths) + longest, limits.batch_size, lm)
        self.capacity = min(pair.window, shared)
        self._num_rows = min(limits.batch_size, len(lengths))
        self._engine: Engine | None = None
        self._decoders: dict[Warp, tuple[BatchDecoder, TargetRounds]] = {}
        # Tokens, and stop tokens among them: how long responses are expected to be.
        self._num_tokens_made = 0
        self._num_stopped = 0

    def memory(self) -> dict[str, float]:
        """Return the bytes that the first responses allocate, by name."""
        lm = self._lm
        is_eager = self._engine_name == "eager"
        spare = 0 if is_eager else 2 * CompiledEngine.bucket
        positions = (self._num_rows + 1) * (self.capacity + spare)
        parts = memory_parts(lm, positions, TOGETHER, self._num_rows)
        if lm.device.type == "cpu" and not is_eager:
            parts |= {"packed copies": bytes_to_pack(lm), "compiler": COMPILER_BYTES}
        return parts

    def respond(
        self,
        prompts: Sequence[Sequence[int]],
        uniform: np.ndarray,
        warp: Warp,
        on_step: OnStep = lambda made, left: None,
        journal: Path | None = None,
        num_later: int = 0,
        with_states: bool = False,
    ) -> list[Response]:
        """Return the response to each prompt.

        Where memory does not suffice, half as many rows go on together; the responses are the same,
        up to the rounding of sums. `failure` marks one whose logits had a NaN.

        Args:
            uniform: (B, max_new_tokens) in [0, 1), one number per sampled token.
            on_step: called after each step with the number of tokens it produced, and how many more
                are expected, with those of `num_later` prompts of later calls.
            journal: a file of what has been made, from which a killed process goes on; the caller
                deletes it.
            with_states: whether responses have the target's states. A journal has none, so no
                journal can be given.
        """
        assert not (journal and with_states), "a journal keeps no states"
        states = _StatesOfRounds() if with_states else None
        keys = [_key(*each, warp) for each in zip(prompts, uniform, strict=True)]
        kept = _Kept(journal, keys)
        if kept.ended or kept.begun:
            logger.info(
                "responses: %d of %d are reused from an interrupted run, and %d partially generated"
                " ones",
                len(kept.ended),
                len(prompts),
                len(kept.begun),
            )
        while True:
            try:
                for requests in self._rounds(prompts, kept, uniform, warp):
                    kept.keep(requests)
                    if states is not None:
                        _, rounds = self._decoders[warp]
                        states.add(requests, rounds.states)
                    num_open = len(prompts) - len(kept.ended) + num_later
                    on_step(len(requests), self._expected(requests, num_open))
                responses = [kept.ended[number] for number in range(len(prompts))]
                return responses if states is None else states.given_to(responses)
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

    def _expected(self, requests: Sequence[Request], num_open: int) -> float:
        """Return how many more tokens are expected of `num_open` responses, some of which are
        `requests` that took a round.
        """
        self._num_tokens_made += len(requests)
        self._num_stopped += sum(request.finish_reason == "stop" for request in requests)
        rate = self._num_stopped / self._num_tokens_made  # how often a token ends a response

        def expected(most: int) -> float:
            return (1 - (1 - rate) ** most) / rate if rate else most

        left = 0.0
        for request in requests:
            if not request.has_ended:
                left += expected(request.limit - len(request.committed))
                num_open -= 1
        return left + num_open * expected(self._limits.max_new_tokens)

    def _rounds(
        self, prompts: Sequence[Sequence[int]], kept: _Kept, uniform: np.ndarray, warp: Warp
    ) -> Iterator[list[Request]]:
        """Yield, after each round, the requests that took it."""
        if len(kept.ended) == len(prompts):
            return
        decoder, _ = self._decoder(warp)
        most = self._limits.max_new_tokens

        def requests() -> Iterator[Request]:
            # Steps read as far as their longest row.
            for number in by_length([len(prompt) for prompt in prompts]):
                if number in kept.ended:
                    continue
                begun = kept.begun.get(number, [])
                numbers = GivenUniforms(uniform[number, len(begun) :])
                text = [*prompts[number], *begun]
                yield decoder.request(number, text, most - len(begun), 0, None, numbers)

        yield from decoder.decode(requests(), None)

    def _decoder(self, warp: Warp) -> tuple[BatchDecoder, TargetRounds]:
        """Return the decoder of a warp, and its rounds; all have the same memory."""
        if self._engine is None:
            how = "responses: %s runs on engine=%s, %d tokens at most"
            logger.info(how, self.pair.target_id, self._engine_name, self._num_tokens)
            self._engine = make_engine(
                self._engine_name, self._lm, self.capacity, num_rows=self._num_rows + 1
            )
        if warp not in self._decoders:
            rounds = TargetRounds(self.pair.target_id, self._engine, warp)
            self._decoders[warp] = BatchDecoder(self.pair, rounds), rounds
        return self._decoders[warp]
