"""The seconds of the steps that decoding consists of, on this machine: draft steps, verifications, and what heads add.

Steps are the decoder's own, compiled or captured like in decoding. They take turns in random order, and draft steps run several
in a row after a step of the target, as in a round, so that weights come from where a decoder's do.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specheads.decoding.baseline import Baseline
from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.drafting.autoregressive import ChainState
from specheads.decoding.engine import Engine, compile_ahead
from specheads.decoding.stopping import FixedLength, HeadThreshold, Logistic, StoppingRule
from specheads.heads.config import HeadConfig
from specheads.heads.head import AcceptanceHead
from specheads.pair import Pair
from specheads.sampling import Warp

IN_A_ROW = 4  # draft steps after each step of the target
LONGEST = 16  # drafted tokens of the longest verification
VERIFIED = (2, 4, 8, LONGEST)  # drafted tokens of the verifications that are timed

Step = Callable[[], object]


@dataclass(frozen=True)
class StepTimes:
    """Median seconds."""

    target: float  # a step of the target alone
    draft: float  # a draft step with a rule that only counts
    verification: Mapping[int, float]  # by the number of drafted tokens, from VERIFIED
    heads: Mapping[int, float]  # by width, what a head adds to a draft step
    logistic: float  # what a logistic of the draft's confidence adds to it
    spread: float = 1.0  # the mean of the target's steps over their median; far above 1 on a busy machine

    @property
    def ratio(self) -> float:
        """How many draft steps a step of the target takes."""
        return self.target / self.draft

    def verify_seconds(self) -> tuple[float, ...]:
        """Return the seconds of verifying 0, 1, ... LONGEST drafted tokens, linear between what was timed."""
        sizes, seconds = zip(*sorted({0: self.target, **self.verification}.items()), strict=True)
        filled = []
        for size in range(LONGEST + 1):
            after = next(place for place, known in enumerate(sizes) if known >= size)
            if sizes[after] == size:
                filled.append(seconds[after])
            else:
                part = (size - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
                filled.append(seconds[after - 1] + part * (seconds[after] - seconds[after - 1]))
        return tuple(filled)


def place(engine: Engine, length: int) -> None:
    """Pretend that `length` positions are in memory."""
    memory: Any = engine
    for layer in memory._layers:
        layer.length = length


def now(device: torch.device) -> float:
    """Return the time once the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class TimedSteps:
    """The steps of decoders that share engines, one for each stopping rule, at a context of some positions."""

    def __init__(self, pair: Pair, warp: Warp, rules: Mapping[str, StoppingRule], context: int, engine: str = "auto") -> None:
        self.context, self.device = context, pair.target_lm.device
        first, *others = rules.items()
        self.decoder = SpeculativeDecoder(pair, stopping=first[1], warp=warp, engine=engine)
        self.decoders = {first[0]: self.decoder} | {name: self.decoder.with_stopping(rule) for name, rule in others}
        self.alone = Baseline(pair, warp, self.decoder.target_engine)
        makers = [*(each.prepare for each in self.decoders.values()), self.alone.prepare]
        compile_ahead(makers)
        for prepare in makers:
            prepare()
        self._uniform = torch.zeros(1, dtype=torch.float64, device=self.device)
        self._ends = torch.zeros(pair.vocab_size, dtype=torch.bool, device=self.device)
        self._token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self._vocab_size = pair.vocab_size

    def target(self) -> Step:
        """Return a step of the target alone."""

        def step() -> None:
            place(self.decoder.target_engine, self.context)
            self.alone._compiled_step(self._token, self._uniform)

        return step

    def verify(self, num_drafted: int) -> Step:
        """Return the verification of some drafted tokens."""
        verifier: Any = self.decoder._verifier
        uniforms = torch.zeros(2, dtype=torch.float64, device=self.device)
        verifier._memory.probs.fill_(1 / self._vocab_size)
        inputs = (uniforms, verifier._lengths.tensor, verifier.start_prompt())
        tokens = verifier._memory.start(self.decoder.target_engine.padded(num_drafted + 1))

        def step() -> None:
            place(self.decoder.target_engine, self.context)
            verifier._compiled_step(tokens, *inputs)

        return step

    def draft(self, name: str) -> Step:
        """Return a draft step with a rule; the host waits for its flag, as in decoding."""
        decoder, memory = self.decoders[name], self.decoder._memory
        drafter: Any = decoder._drafter
        assert memory is not None
        stopped = torch.zeros(1, dtype=torch.bool, device=self.device)
        state = ChainState(stopped, decoder.stopping.start_prompt(1, self.device))

        def step() -> None:
            place(decoder.draft_engine, self.context)
            after = drafter._step(self._token, memory.indices[0], self._uniform, self._ends, state)
            after.stopped.item()

        return step

    def seconds(self, drafts: Mapping[str, Step], others: Mapping[str, Step], repeats: int) -> dict[str, list[float]]:
        """Return the seconds of steps: `drafts` run several in a row after a step of the target, `others` alone."""
        first, taken = self.target(), {name: list[float]() for name in (*drafts, *others)}
        order = random.Random(0)
        for _ in range(repeats):
            for name in order.sample(list(taken), len(taken)):
                count = IN_A_ROW if name in drafts else 1
                first()
                step, start = {**drafts, **others}[name], now(self.device)
                for _ in range(count):
                    step()
                taken[name].append((now(self.device) - start) / count)
        return taken


@torch.no_grad()
def step_times(
    pair: Pair, warp: Warp, widths: Sequence[int], context: int = 256, repeats: int = 40, engine: str = "auto"
) -> StepTimes:
    """Return the times of a pair's steps, with heads of random weights of some widths.

    Args:
        context: positions in memory.
        repeats: times that each step is timed.
    """
    confidence = Logistic({"logit_max_prob": 1.0, "bias": 0.0}, 1.0, max_tokens=LONGEST)
    rules: dict[str, StoppingRule] = {"fixed": FixedLength(LONGEST), "logistic": confidence}
    for width in widths:
        config = HeadConfig(pair.draft_lm.hidden_size, width=width, vocab_size=pair.vocab_size)
        head = AcceptanceHead(config).to(pair.draft_lm.device).requires_grad_(False).eval()
        rules[str(width)] = HeadThreshold(head, 1.0, max_tokens=LONGEST)
    timed = TimedSteps(pair, warp, rules, context, engine)
    others = {"target": timed.target()} | {f"verify {count}": timed.verify(count) for count in VERIFIED}
    taken = timed.seconds({name: timed.draft(name) for name in rules}, others, repeats)
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    return StepTimes(
        target=seconds["target"],
        draft=seconds["fixed"],
        verification={count: seconds[f"verify {count}"] for count in VERIFIED},
        heads={width: max(0.0, seconds[str(width)] - seconds["fixed"]) for width in widths},
        logistic=max(0.0, seconds["logistic"] - seconds["fixed"]),
        spread=statistics.mean(taken["target"]) / seconds["target"],
    )
