"""The target alone, one token per forward pass: what speculative decoding is compared with."""

import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from specheads.decoding.arguments import check_count
from specheads.decoding.batch.decoder import BatchDecoder
from specheads.decoding.batch.rounds import TargetRounds
from specheads.decoding.engine import Engine, ForwardOutput, make_engine
from specheads.decoding.host_numbers import HostNumbers
from specheads.decoding.records import Generation, Round
from specheads.decoding.session import Prompt, checked_window, start_session
from specheads.pair import Pair
from specheads.sampling import Warp, check_no_nan, has_nan


class TargetStep:
    """The epilogue of a forward pass of the target alone."""

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.compile_key = (TargetStep, warp)

    def __call__(self, output: ForwardOutput, uniform: Tensor) -> Tensor:
        """Return the next token and whether there was a NaN, (2,) long."""
        probs = self.warp(output.logits[:, -1])
        return torch.cat([self.warp.draw(probs, uniform), has_nan(probs).long()])


class Baseline:
    """The target alone, one token per forward pass, with the engine and the warping of speculative decoding."""

    def __init__(self, pair: Pair, warp: Warp | None = None, engine: str | Engine = "auto", window: int | None = None) -> None:
        self.pair, self.warp, self._engine_name = pair, warp or Warp(), engine if isinstance(engine, str) else "auto"
        self.engine = make_engine(engine, pair.target_lm, checked_window(pair, window)) if isinstance(engine, str) else engine
        self._compiled_step = self.engine.compiled_step(TargetStep(self.warp))
        self._last = HostNumbers((1, 1), self.engine.lm.device)
        self._batch: BatchDecoder | None = None  # with memory for one number of rows at a time
        self.startup_seconds, self.is_warm = 0.0, False

    def warm_up(self) -> float:
        """Compile, load or capture all that generation will run; return the seconds. The first generation does it otherwise."""
        start = time.perf_counter()
        self.prepare()
        self.startup_seconds, self.is_warm = time.perf_counter() - start, True
        return self.startup_seconds

    @torch.no_grad()
    def prepare(self) -> None:
        """Prepare all that generation will run, one step after another."""
        self.engine.warm_up(self._compiled_step, (1,), torch.zeros(1, dtype=torch.float64, device=self.engine.lm.device))

    @torch.no_grad()
    def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, seed: int = 0, stop_tokens: Sequence[int] | None = None
    ) -> Generation:
        """Return the response to `prompt`; see SpeculativeDecoder.generate."""
        if not self.is_warm:
            self.warm_up()
        session = start_session(self.pair, prompt, max_new_tokens, seed, stop_tokens, (self.engine,))
        rounds = []
        while session.finish_reason is None:
            start = session.clock.mark()
            self._last.numbers[0, 0] = session.committed[-1]
            self._last.send()
            token, nan = self._compiled_step(self._last.tensor, session.verify_uniforms.take(1)).tolist()
            verified = session.clock.mark()
            if nan:
                self.engine.clear()
            check_no_nan(self.pair.target_id, nan, len(session.response))
            emitted = session.commit([token])
            times = session.clock.read(start, verified, session.clock.mark())
            rounds.append(Round(emitted, 0, 0, 0, 0, 0.0, times[1] - times[0], times[2] - times[1]))
        return session.finish(self.pair, rounds)

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        max_batch: int = 8,
        max_new_tokens: int = 256,
        seeds: Sequence[int] | None = None,
        stop_tokens: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """Yield `(number, generation)` for each prompt as its response ends; see SpeculativeDecoder.generate_batch."""
        check_count("max_batch", max_batch, least=1)
        if self._batch is None or self._batch.num_rows != max_batch:
            engine = make_engine(self._engine_name, self.pair.target_lm, self.engine.capacity, num_rows=max_batch + 1)
            self._batch = BatchDecoder(self.pair, TargetRounds(self.pair.target_id, engine, self.warp, max_batch), max_batch)
        return self._batch.generate(prompts, max_new_tokens, seeds, stop_tokens)


def generate_baseline(
    pair: Pair,
    prompt: Prompt,
    max_new_tokens: int = 256,
    seed: int = 0,
    warp: Warp | None = None,
    engine: str = "auto",
    stop_tokens: Sequence[int] | None = None,
) -> Generation:
    """Return the target's response to `prompt`, decoded without a draft by the engine and the warping of speculative decoding."""
    return Baseline(pair, warp, engine).generate(prompt, max_new_tokens, seed, stop_tokens)
