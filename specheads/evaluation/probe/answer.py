"""What to do, from what each way to decode is predicted to be worth: the simplest one that nothing beats noticeably."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specheads.evaluation.intervals import Interval
from specheads.evaluation.probe.prediction import BETTER, BLOCK, FIXED_NAME, LOGISTIC, MORE_OVERLAP, PLAIN, Option

# Of speed, what a more complicated way to decode must gain over the simpler one, by what it has to do. Decoded next to predicted
# gains of the embedded pairs (docs/measurements/archive.md): block verification up to 2 % less, rules and heads 2 to 6 % less.
NOTICEABLE = {FIXED_NAME: 0.01, BLOCK: 0.02, LOGISTIC: 0.05}
WORTH_TRAINING = 0.05  # the same for a head
WORTH_DISTILLING = 0.05  # and for a draft


@dataclass(frozen=True)
class Answer:
    """The recommended way to decode, its speed-up, a sentence that says so, and the command that comes next."""

    choice: str
    speedup: Interval
    text: str
    command: str


CommandLine = Callable[..., str]  # of a verb and its words


def answer_of(options: Sequence[Option], command_line: CommandLine) -> Answer:
    """Return the answer that options give; `command_line` writes the command that comes next, with the pair."""
    known = {option.name: option for option in options}
    heads = [option for option in options if option.width is not None]
    ladder = [known[PLAIN], known[FIXED_NAME]]
    ladder += [known[name] for name in (BLOCK, LOGISTIC) if name in known]
    chosen = ladder[0]
    for option in ladder[1:]:
        if option.speedup.value > chosen.speedup.value * (1 + NOTICEABLE[option.name]):
            chosen = option
    head = max(heads, key=lambda option: option.speedup.value) if heads else None
    if head is not None and head.speedup.value > chosen.speedup.value * (1 + WORTH_TRAINING):
        chosen = head
    text = f"{_said(chosen)}: {_times(chosen.speedup)} the speed of the target alone"
    if chosen.name not in (PLAIN, FIXED_NAME):
        gain = chosen.gain
        text += f", {gain.value - 1:+.1%} [{gain.low - 1:+.1%}, {gain.high - 1:+.1%}] over the best fixed length"
    better = known[BETTER]
    distil = better.gain.value > 1 + WORTH_DISTILLING and better.speedup.value > chosen.speedup.value
    if distil:
        text += f". A draft with {MORE_OVERLAP:.0%} more overlap would bring {_times(better.speedup)} by itself: distil it first"
    return Answer(chosen.name, chosen.speedup, f"{text}.", command_line(*_next(chosen, distil)))


def _next(chosen: Option, distil: bool) -> tuple[str, ...]:
    """Return the verb that comes next, and its words besides the pair."""
    if distil:
        return ("distill",)
    if chosen.width is not None:
        return "train", f"head.width={chosen.width}"
    rules = {BLOCK: ("compare_verification=[block]",), LOGISTIC: ("stopping=[fixed_length,logistic]",)}
    return "evaluate", "head=null", *rules.get(chosen.name, ())


def _said(chosen: Option) -> str:
    if chosen.name == PLAIN:
        return "Do not speculate with this draft"
    if chosen.name == FIXED_NAME:
        return f"Draft a fixed number of tokens ({chosen.value})"
    if chosen.width is not None:
        return f"Train a head ({chosen.width} wide)"
    return {BLOCK: f"Use block verification ({chosen.value})", LOGISTIC: f"Stop by a logistic ({chosen.value})"}[chosen.name]


def _times(speedup: Interval) -> str:
    return f"{speedup.value:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"
