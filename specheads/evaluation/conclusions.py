"""The conclusions of a report: which ratios and rules matter, and the key findings and notes as sentences."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from specheads.decoding.records import LARGEST_DRIFT, REMEDY
from specheads.evaluation.candidates import FIXED, TARGET
from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import COUNTED, MEASURED, ROUNDS, DataSet, Information, Report, Winner


class Shown(NamedTuple):
    """An estimate for a reader: its value, and the limits of its interval."""

    text: str
    limits: str

    def __str__(self) -> str:
        return f"{self.text} {self.limits}"


def times(each: Interval) -> Shown:
    """Return a factor: 1.7 is 1.70×."""
    return Shown(f"{each.value:.2f}×", f"[{each.low:.2f},\u00a0{each.high:.2f}]")


def change(each: Interval) -> Shown:
    """Return a ratio as a change: 1.044 is +4.4 %."""
    return Shown(f"{signed(each.value)}\u00a0%", f"[{signed(each.low)},\u00a0{signed(each.high)}]")


def percent(each: Interval) -> Shown:
    """Return a share: 0.31 is 31 %."""
    limits = minus(f"[{each.low * 100:.0f},\u00a0{each.high * 100:.0f}]")
    return Shown(minus(f"{each.value:.0%}").replace("%", "\u00a0%"), limits)


def signed(ratio: float) -> str:
    """Return a ratio as a change in percent, with its sign."""
    return minus(f"{ratio * 100 - 100:+.1f}")


def minus(text: str) -> str:
    """Return text with a minus sign in place of each hyphen."""
    return text.replace("-", "−")


def share_text(share: float) -> str:
    """Return a cost: 0.125 is 12.5 %."""
    return minus(f"{share * 100:.3g} %")


PREFERRED = "10"  # ratio to begin with where none was measured


def ratios_of(report: Report) -> list[str]:
    """Return every ratio that has predictions, the measured one first, or last if it is not to be trusted."""
    ratios = {row.ratio for data_set in report.data_sets for row in data_set.winners}
    ratios |= {ratio for data_set in report.data_sets for row in data_set.rules for ratio in row.speedup}
    ratios |= {ratio for row in report.bank for ratio in row.speedup}
    measured = -inf if is_trusted(report, MEASURED) else inf
    return sorted(ratios, key=lambda ratio: measured if ratio == MEASURED else float(ratio))


def preferred(ratios: Sequence[str]) -> str | None:
    """Return which of `ratios_of` a reader sees first: the measured one where it is to be trusted."""
    return PREFERRED if PREFERRED in ratios and ratios[0] != MEASURED else next(iter(ratios), None)


def main_data_set(report: Report) -> int | None:
    """Return which data set a reader sees first: the first of test prompts, else the first of all."""
    tests = [number for number, data_set in enumerate(report.data_sets) if data_set.role == "test"]
    return next(iter(tests), 0 if report.data_sets else None)


def ratio_text(report: Report, ratio: str) -> str:
    """Return a ratio as a reader knows it; that of this machine with its number, and marked if it is not to be trusted."""
    if ratio != MEASURED:
        return ratio
    how = ("counted" if _is_counted(report) else MEASURED) + ("" if is_trusted(report, ratio) else ", doubtful")
    return f"{report.costs.ratio:.1f} ({how})" if report.costs else how


def _is_counted(report: Report) -> bool:
    return report.basis is not None and report.basis.costs == COUNTED


def winners_at(data_set: DataSet, ratio: str | None) -> list[Winner]:
    """Return the winners at a ratio: those that a decoder could use, the fastest on dev prompts first, then the bounds."""
    winners = [row for row in data_set.winners if row.ratio == ratio]
    return sorted(winners, key=lambda row: (row.bound, -row.dev_speedup))


def is_trusted(report: Report, ratio: str) -> bool:
    """Whether predictions at a ratio can be trusted; at the measured ratio they cannot if they are from doubtful rounds."""
    return ratio != MEASURED or not report.doubts or (report.basis is not None and report.basis.costs != ROUNDS)


def best(winners: Iterable[Winner], head: bool) -> Winner | None:
    """Return the winner that was fastest on dev prompts, with a head or without; fixed lengths do not count."""
    rules = [row for row in winners if not row.bound and (row.head is not None) == head and row.family != FIXED]
    return max(rules, key=lambda row: row.dev_speedup, default=None)


def key_findings(report: Report) -> list[str]:
    """Return the key findings: what to use here, a sentence or two per ratio for the first test data set, batches.

    Live figures are left out where they are not to be trusted.
    """
    number, ratios = main_data_set(report), [ratio for ratio in ratios_of(report) if is_trusted(report, ratio)]
    replayed = [] if number is None else [_replayed(report, report.data_sets[number], ratio) for ratio in ratios]
    findings = [text for text in replayed if text]
    use, batches = ([], []) if report.doubts else (_recommendation(report), _batch_findings(report))
    return [*use, *_basis(report), *findings, *_information(report), *batches, *_drift(report)]


def _basis(report: Report) -> Iterator[str]:
    """Yield with doubts what is best by replay over the range of costs; and what the answer stands on, where there is one."""
    basis, number, here = report.basis, main_data_set(report), "For this pair on this machine, use"
    if basis is None or (report.doubts and not basis.choices):
        return
    low, value, high = (f"{ratio:.1f}" for ratio in (basis.ratio.low, basis.ratio.value, basis.ratio.high))
    if report.doubts and report.recommended is None:
        first, middle, last = basis.choices
        yield f"{here} {middle}, if anything: at ratio {low} {first} is best, at {high} {last}, so no threshold was stored."
    elif report.doubts and number is not None:
        rows = [row for row in report.data_sets[number].rules if row.name == report.recommended]
        predicted = [f", predicted to be {times(row.speedup[MEASURED])} as fast as the target alone" for row in rows]
        yield f"{here} {report.recommended}{''.join(predicted)}: from ratio {low} to {high} nothing else is clearly faster."
    yield f"The answer stands on {basis.costs}: a forward pass of the target costs {value} draft steps, between {low} and {high}."


def _drift(report: Report) -> Iterator[str]:
    """Yield which decoded rules expected another number of accepted tokens than there were, and what to do about it."""
    for row in report.live:
        share = row.accepted_over_expected
        if share is not None and (share.low > 1 + LARGEST_DRIFT or share.high < 1 - LARGEST_DRIFT):
            yield (
                f"Of the tokens that {row.name} expected to be accepted, {percent(share)} were, so its predictions do not hold "
                f"on these prompts; {REMEDY if row.head is not None else 'fit it again'}."
            )


def information_text(known: Information) -> str:
    """Return how much of the uncertainty about acceptance can be known, and who explains how much of that."""
    explained = ", ".join(f"{name} {percent(share)}" for name, share in known.explained.items())
    return (
        f"{known.entropy.value:.3f} nats per drafted token, of which {known.noise.value:.3f} are noise and "
        f"{known.knowable.value:.3f} could be known; of these explain: {explained}"
    )


def _information(report: Report) -> Iterator[str]:
    number = main_data_set(report)
    if number is not None and (known := report.data_sets[number].information) is not None:
        yield f"Uncertainty about acceptance: {information_text(known)}."


def _recommendation(report: Report) -> Iterator[str]:
    """Yield the setting that was fastest on dev prompts with its speed on the decoded ones; where none was tried, the fastest."""
    rows = [row for row in report.live if row.family != TARGET and row.lossless]
    fastest = max(rows, key=lambda row: row.speedup.value, default=None)
    chosen = next((row for row in report.live if row.name == report.recommended), None)
    row = chosen or fastest
    if row is None:
        return
    speed, faster = f"{row.tokens_per_second.value:,.1f} tokens per second", f"{times(row.speedup)} as fast as the target alone"
    here = "For this pair on this machine, use"
    if chosen is None:
        yield f"Measured: the fastest setting, {row.name}, decodes {speed}, {faster}."
    elif row.family == TARGET:
        yield f"{here} the target alone, {speed}: on dev prompts no setting was clearly faster."
    else:
        yield f"{here} {row.name}: it decodes {speed}, {faster} (it was the fastest on dev prompts)."
    if fastest is not None and fastest.speedup.value < 1:
        text = f"Speculative decoding makes this pair slower here: the best setting, {fastest.name}, reaches "
        text += f"{fastest.speedup.value:.2f}× of the target alone"
        if report.costs is not None and report.costs.draft_seconds:
            text += f", because a forward pass of the target costs only {report.costs.ratio:.1f} draft steps on this machine"
        yield f"{text}."


def _replayed(report: Report, data_set: DataSet, ratio: str) -> str:
    """Return what the best rules are predicted to be worth at a ratio; nothing without rules."""
    winners = winners_at(data_set, ratio)
    head, other = best(winners, head=True), best(winners, head=False)
    fastest = next((row for row in winners if not row.bound), None)
    if fastest is not None and fastest.speedup.value <= 1:
        text = (
            f"At ratio {ratio_text(report, ratio)}, nothing is predicted to be faster than the target alone: the best setting, "
        )
        return f"{text}{fastest.name}, is {times(fastest.speedup)} as fast."
    first, title = (head, "the head") if head else (other, "the best rule")
    if first is None:
        return ""
    text = f"At ratio {ratio_text(report, ratio)}, {title} ({first.name}) is {times(first.speedup)} as fast as "
    text += f"the target alone, {change(first.gain)} over the best fixed length"
    if first.gap_ceiling is not None and first.gap_ceiling.value > 0:
        text += f", closing {percent(first.gap_ceiling)} of the gap to the informed ceiling"
    if first.gain.low <= 1 <= first.gain.high:
        text += " (an interval that includes no gain)"
    if first.head_share is not None and first.break_even is not None and first.head_share >= first.break_even.value:
        text += f"; it does not pay for its head, which adds {share_text(first.head_share)} to a draft step and would "
        even = first.break_even.value
        text += f"break even at {share_text(even)}" if even > 0 else "not even pay if it added nothing"
    if head and other:
        verb = "is faster," if other.speedup.value > head.speedup.value else "reaches"
        text += f"; without a head, {other.name} {verb} {change(other.gain)}"
    return f"{text}."


def counted_text(report: Report, ratio: str) -> str:
    """Return which costs predicted speeds at one ratio count."""
    if ratio == MEASURED and not _is_counted(report):
        return "costs as measured here"
    text = "verifying more tokens costs nothing"
    return f"{text}, heads’ costs are counted from their weights" if report.context.get("heads") else text


def live_texts(report: Report) -> list[str]:
    """Return what is to be said of the decoded settings: the costs of their rounds, and the gain of heads."""
    texts, fit = [], report.fit
    if fit is not None:
        costs = fit.costs
        how = f"medians of {fit.num_rounds:,} rounds" if fit.num_rounds else "steps timed by themselves"
        text = f"Measured costs, by {how}: draft step {costs.draft_seconds * 1e3:.2f} ms, "
        text += f"the target's forward pass {costs.target_seconds * 1e3:.2f} ms and "
        text += f"{costs.verified_seconds * 1e3:.3f} ms more per drafted token, and "
        text += f"{costs.round_seconds * 1e3:.2f} ms of overhead per round; ratio {costs.ratio:.2f}"
        texts = [f"{text}."]
    gains = [f"{change(gain)} at ratio {ratio_text(report, ratio)}" for ratio, gain in report.gains.items() if gain is not None]
    if gains:
        texts.append(f"The live head over the best live fixed length, cross-fitted: {'; '.join(gains)}.")
    return texts


def _batch_findings(report: Report) -> list[str]:
    """Return up to which size of batches speculation pays here, by all requests' tokens per second of lossless settings."""
    pays, fails = list[str](), list[str]()
    for table in report.batches:
        rows = sorted((row for row in table.rows if row.lossless), key=lambda row: -row.tokens_per_second)
        first = next(row for row in rows if row.family != TARGET)
        (pays if first.over_alone > 1 else fails).append(f"{table.concurrency} ({first.over_alone:.2f}×, {first.name})")
    if not pays and not fails:
        return []
    text = f"In batches, the best setting is faster than the target alone with {', '.join(pays)} requests at once"
    if not pays:
        text = f"In batches, no setting is faster than the target alone: {', '.join(fails)} requests at once"
    elif fails:
        text += f", but not with {', '.join(fails)}"
    return [f"{text}."]
