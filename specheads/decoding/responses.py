"""Responses of one model to many prompts: rows of one memory, in which the next prompt follows a response that has ended.

Each prompt has separate uniform numbers, so its response depends neither on its neighbours nor on timing, up to the rounding of
sums.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specheads.decoding.engine import CompiledEngine, Engine, bytes_to_pack, make_engine, resolve_engine
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

logger = logging.getLogger(__name__)

# Compiling takes five seconds, twenty with the operators, which are kept. Plain PyTorch makes this many tokens of a small model
# in about ten.
TOKENS_WORTH_COMPILING = 8_000
COMPILER_BYTES = 150e6  # of the compiler's modules, and of steps
SHARED_BYTES = 2**31  # of KV memory, up to which it is made larger than it need be

OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Response:
    """A response: `ids` with the stop token, if there is one; `finished` says whether there is."""

    ids: list[int]
    finished: bool


def row_uniforms(seed: int, prompt_id: str, max_new_tokens: int, num_samples: int = 1, response: int = 0) -> np.ndarray:
    """Return (1 + num_samples, max_new_tokens) uniform numbers of a prompt's response number `response`.

    Row 0 samples the response, the others the drafted tokens, `num_samples` at each position.
    """
    seeds = [seed, int(prompt_id, 16)] + ([0, response] if response else [])
    return np.random.default_rng(seeds).random((1 + num_samples, max_new_tokens))


def _engine_worth(num_tokens: int) -> str:
    """Return the name of the engine for `num_tokens` tokens: `auto`, or `eager` where compiling would not pay."""
    name = resolve_engine("auto")
    return "eager" if name == "auto" and num_tokens < TOKENS_WORTH_COMPILING else name


def _shared_capacity(capacity: int, num_rows: int, lm: LanguageModel) -> int:
    """Return the positions to allocate for `capacity`, in few sizes on a CPU: sets of prompts share what is compiled for one.

    Where that would take more than SHARED_BYTES of memory, it stays as it is.
    """
    spare, config = 2 * CompiledEngine.bucket, lm.config  # spare: what an engine adds
    shared = (1 << (capacity + spare - 1).bit_length()) - spare
    numbers = 2 * config.num_hidden_layers * config.hidden_size * lm.output_embedding.weight.itemsize  # at most, of a position
    return shared if lm.device.type == "cpu" and num_rows * shared * numbers <= SHARED_BYTES else capacity


class Responder:
    """Makes responses. Memory is allocated at the first, for as many positions as the longest can need."""

    def __init__(
        self,
        pair: Pair,
        lengths: Sequence[int],
        limits: ResponseLimits,
        lm: LanguageModel | None = None,
        engine: str | None = None,
    ) -> None:
        """Plan responses.

        Args:
            lengths: tokens of all prompts that will be responded to; they decide the engine, and with it rounding.
            limits: of a response's length, and the rows that are decoded together.
            lm: one of the pair's models; default: the target.
            engine: default: one that is worth its preparation.
        """
        self.pair, self._limits = pair, limits
        self._lm = lm or pair.target_lm
        self._model_id = pair.target_id if self._lm is pair.target_lm else pair.draft_id
        self._num_tokens = sum(min(limits.max_new_tokens, pair.window - length) for length in lengths)
        self._engine_name = engine or _engine_worth(self._num_tokens)
        self.capacity = min(pair.window, _shared_capacity(max(lengths) + limits.max_new_tokens, limits.batch_size, self._lm))
        self._num_rows = min(limits.batch_size, len(lengths))
        self._engine: Engine | None = None
        self._decoders: dict[Warp, RowsDecoder] = {}

    def memory(self) -> dict[str, float]:
        """Return the bytes that the first responses allocate, by name."""
        lm, is_eager = self._lm, self._engine_name == "eager"
        positions = (self._num_rows + 1) * (self.capacity + (0 if is_eager else 2 * CompiledEngine.bucket))
        parts = memory_parts(lm, positions, TOGETHER, self._num_rows)
        compiled = {"packed copies": bytes_to_pack(lm), "compiler": COMPILER_BYTES}
        return parts | (compiled if lm.device.type == "cpu" and not is_eager else {})

    def respond(
        self,
        prompts: Sequence[Sequence[int]],
        uniform: np.ndarray,
        warp: Warp,
        on_step: OnStep = lambda made, ended: None,
    ) -> list[Response]:
        """Return the response to each prompt.

        Args:
            prompts: token ids per prompt.
            uniform: (B, max_new_tokens) in [0, 1), one number per sampled token.
            on_step: called after each step with the number of tokens it produced, and of responses that ended in it.

        Where memory does not suffice, half as many rows are decoded together, from there on; the responses are the same, up to
        the rounding of sums.

        Raises:
            UserError: the model's logits have a NaN.
        """
        while True:
            responses: dict[int, Response] = {}
            num_tokens = 0
            try:
                for rows in self._rounds(prompts, uniform, warp):
                    ended = {row.number: Response(row.response, row.finish_reason == "stop") for row in rows if row.has_ended}
                    responses |= ended
                    num_tokens += len(rows)
                    on_step(len(rows), len(ended))
                return [responses[number] for number in range(len(prompts))]
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self._num_rows == 1:
                    raise
            on_step(-num_tokens, -len(responses))
            before, self._num_rows, self._engine = self._num_rows, self._num_rows // 2, None
            self._decoders.clear()
            if self._lm.device.type == "cuda":
                torch.cuda.empty_cache()
            how = "responses: %d rows do not fit into memory; %d are decoded together from here on"
            logger.warning(how, before, self._num_rows)

    def _rounds(self, prompts: Sequence[Sequence[int]], uniform: np.ndarray, warp: Warp) -> Iterator[list[Row]]:
        """Yield, after each round, the rows that took it; raises UserError for one that failed."""
        decoder, most = self._decoder(warp), self._limits.max_new_tokens

        def opened() -> Iterator[Row]:
            for number in by_length([len(prompt) for prompt in prompts]):  # steps read as far as their longest row
                yield decoder.row(number, prompts[number], most, 0, None, GivenUniforms(uniform[number]))

        for rows in decoder.decode(opened(), None):
            if failures := [row.failure for row in rows if row.failure is not None]:
                raise UserError(failures[0])
            yield rows

    def _decoder(self, warp: Warp) -> RowsDecoder:
        """Return the decoder of a warp; all have the same memory."""
        if self._engine is None:
            logger.info("responses: %s runs on engine=%s, %d tokens at most", self._model_id, self._engine_name, self._num_tokens)
            self._engine = make_engine(self._engine_name, self._lm, self.capacity, num_rows=self._num_rows + 1)
        if warp not in self._decoders:
            self._decoders[warp] = RowsDecoder(self.pair, TargetRounds(self._model_id, self._engine, warp))
        return self._decoders[warp]
