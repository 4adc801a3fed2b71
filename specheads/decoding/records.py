"""What decoding did: rounds, totals and finished responses, and the clock that times rounds."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from specheads.pair.language_model import LanguageModel

# How drafted tokens were chosen, which decides what may verify them; other drafts name their own
# kind
CHAIN = "a sampled chain"
# Between accepted tokens and those that a rule expected, beyond which it is worth fitting again
LARGEST_DRIFT = 0.1
REMEDY = (
    "specheads evaluate head=<folder> calibrate=true, with the same model, data and warp, fits it"
    " to such prompts"
)


class Round(NamedTuple):
    """One cycle of draft, verify and commit, with the seconds spent in each."""

    # The accepted tokens, then the target's unless the response ended before it.
    tokens: Sequence[int]
    num_drafted: int = 0
    num_accepted: int = 0
    num_discarded: int = 0
    num_draft_calls: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0  # seconds to rewind memory and commit tokens
    num_target_calls: int = 1
    # From the row's last tokens to this round: other rows commit, prompts are read.
    wait_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of the whole round, and of the wait before it."""
        return self.wait_seconds + self.draft_seconds + self.verify_seconds + self.commit_seconds


@dataclass(frozen=True)
class DecodeStats:
    """Totals of one or more generations.

    Rates follow SpecDec++ (section 2), and speeds leave out the reading of prompts.
    """

    num_tokens: int
    num_drafted: int
    num_accepted: int
    num_discarded: int
    num_target_calls: int
    num_draft_calls: int
    seconds: float  # those of whole calls, prefill_seconds included
    prefill_seconds: float  # seconds to read prompts
    # Accepted tokens that the stopping rule expected; None: it does not expect a number.
    num_expected: float | None = None

    @classmethod
    def of(
        cls,
        rounds: Sequence[Round],
        prefill_seconds: float = 0.0,
        num_expected: float | None = None,
    ) -> "DecodeStats":
        return cls(
            num_tokens=sum(len(each.tokens) for each in rounds),
            num_drafted=sum(each.num_drafted for each in rounds),
            num_accepted=sum(each.num_accepted for each in rounds),
            num_discarded=sum(each.num_discarded for each in rounds),
            num_target_calls=sum(each.num_target_calls for each in rounds),
            num_draft_calls=sum(each.num_draft_calls for each in rounds),
            seconds=prefill_seconds + sum(each.seconds for each in rounds),
            prefill_seconds=prefill_seconds,
            num_expected=num_expected,
        )

    @classmethod
    def total(cls, parts: Sequence["DecodeStats"]) -> "DecodeStats":
        """Add up several generations.

        What a rule expected is known only if it is of all of them.
        """
        expected = [part.num_expected for part in parts if part.num_expected is not None]
        totals = dict[str, Any]()
        for each in fields(cls):
            if each.name != "num_expected":
                totals[each.name] = sum(getattr(part, each.name) for part in parts)
        known = sum(expected) if len(expected) == len(parts) else None
        return cls(**totals, num_expected=known)

    @property
    def discard_rate(self) -> float:
        """Rejected drafted tokens per emitted token."""
        return self.num_discarded / self.num_tokens

    @property
    def verification_rate(self) -> float:
        """Target forward passes per emitted token."""
        return self.num_target_calls / self.num_tokens

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens per target forward pass."""
        return self.num_tokens / self.num_target_calls

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the drafted tokens, without a graph's copies.

        None where nothing was drafted.
        """
        # A tree's is low because its siblings exclude each other; GSD's authors divide by draft
        # steps instead.
        return 1 - self.num_discarded / self.num_drafted if self.num_drafted else None

    @property
    def accepted_over_expected(self) -> float | None:
        """Accepted tokens over those that the stopping rule expected: 1 if its predictions are
        calibrated; None if unknown.
        """
        return self.num_accepted / self.num_expected if self.num_expected else None

    @property
    def decode_seconds(self) -> float:
        """The seconds of all rounds, without the reading of prompts."""
        return self.seconds - self.prefill_seconds

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding, without the reading of prompts."""
        return self.num_tokens / self.decode_seconds


def short_repr(choice: object) -> str:
    """Return the class and the plain attributes of a rule or a drafting method."""
    shown = []
    for name, value in vars(choice).items():
        if name != "compile_key" and isinstance(value, str | int | float | list | tuple):
            shown.append(f"{name}={value!r}")
    return f"{type(choice).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Generation:
    """A finished response."""

    prompt_ids: Tensor  # (T,) long
    tokens: Tensor  # (N,) long, without the prompt; a stop token is part of it
    text: str  # special tokens left out
    rounds: Sequence[Round]
    stats: DecodeStats
    finish_reason: str  # stop | length (max_new_tokens) | context (the models' window is full)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:59]}…"
        passes = f"{self.stats.num_target_calls} target forward passes"
        return (
            f"Generation({text!r}, {self.stats.num_tokens} tokens in {passes},"
            f" finish_reason={self.finish_reason!r})"
        )


Mark: TypeAlias = Any  # the host's seconds, or an event in the queue of the first GPU


class Clock:
    """Marks moments of decoding and reads several of them at once.

    On GPUs a mark is an event, which no one waits for; reading waits for the last mark, after which
    the host may overwrite what the devices were to read. GPUs that decode nothing are left alone: a
    process that waits for one makes a context on it.
    """

    def __init__(self, models: Iterable[LanguageModel]) -> None:
        # A model that is spread over several GPUs begins on the first of them.
        spread = [lm.model.parameters() for lm in models if lm.device.type == "cuda"]
        devices = dict.fromkeys(weight.device for weights in spread for weight in weights)
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._last: tuple[Mark, float] = (self.mark(), 0.0)

    def mark(self) -> Mark:
        """Return the moment at which all that was issued so far is done."""
        if not self._gpus:
            return time.perf_counter()
        queue, *others = [torch.cuda.current_stream(gpu) for gpu in self._gpus]
        for other in others:
            queue.wait_stream(other)  # times of one GPU alone can be compared
        event = torch.cuda.Event(enable_timing=True)
        event.record(queue)
        return event

    def read(self, *marks: Mark) -> list[float]:
        """Return the times of marks, in the order in which they were made, as seconds since some
        moment.
        """
        if not self._gpus:
            return list(marks)
        marks[-1].synchronize()
        times = []
        (last, seconds) = self._last
        for mark in marks:
            # From one mark to the next: over a long time the difference of two events is rounded to
            # more than a stage takes.
            seconds += last.elapsed_time(mark) / 1000
            times.append(seconds)
            last = mark
        self._last = last, seconds
        return times
