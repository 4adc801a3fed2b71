"""Numbers of a report as text."""

from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import MEASURED


def times(estimate: Interval) -> str:
    """Return a factor: 1.7 is 1.70×."""
    return f"{estimate.value:.2f}×"


def times_limits(estimate: Interval) -> str:
    """Return the limits of a factor."""
    return f"[{estimate.low:.2f},\u00a0{estimate.high:.2f}]"


def change(estimate: Interval) -> str:
    """Return a ratio as a change: 1.044 is +4.4 %."""
    return f"{signed(estimate.value)}\u00a0%"


def change_limits(estimate: Interval) -> str:
    """Return the limits of a change, in percent."""
    return f"[{signed(estimate.low)},\u00a0{signed(estimate.high)}]"


def percent(estimate: Interval) -> str:
    """Return a share: 0.31 is 31 %."""
    return minus(f"{estimate.value:.0%}").replace("%", "\u00a0%")


def percent_limits(estimate: Interval) -> str:
    """Return the limits of a share, in percent."""
    return minus(f"[{estimate.low * 100:.0f},\u00a0{estimate.high * 100:.0f}]")


def signed(ratio: float) -> str:
    """Return a ratio as a change in percent, with its sign."""
    return minus(f"{ratio * 100 - 100:+.1f}")


def minus(text: str) -> str:
    """Return text with a minus sign in place of each hyphen."""
    return text.replace("-", "−")


def share_text(share: float) -> str:
    """Return a cost: 0.125 is 12.5 %."""
    return minus(f"{share * 100:.3g} %")


def ratio_name(ratio: str) -> str:
    """Return a cost ratio as a sentence names it."""
    return "the measured ratio" if ratio == MEASURED else f"ratio {ratio}"
