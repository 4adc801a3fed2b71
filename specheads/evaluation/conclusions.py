"""The conclusions of a report: what to use, what that rests on, and further findings as
sentences.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple, TypeVar

from specheads.decoding.records import LARGEST_DRIFT, REMEDY
from specheads.evaluation.candidates import FIXED, TARGET, TARGET_ALONE, Candidate
from specheads.evaluation.report import (
    MEASURED,
    BatchRow,
    BatchTable,
    ComparedSetting,
    Comparison,
    DataSet,
    Information,
    Kind,
    LiveRow,
    Report,
    Verdict,
    Winner,
)
from specheads.replay.intervals import Interval, is_clearly_faster


class FormattedInterval(NamedTuple):
    """An estimate for a reader: its value, and the limits of its interval."""

    text: str
    limits: str

    def __str__(self) -> str:
        return f"{self.text} {self.limits}"


def times(each: Interval) -> FormattedInterval:
    """Return a factor: 1.7 is 1.70×."""
    return FormattedInterval(f"{each.value:.2f}×", f"[{each.low:.2f},\u00a0{each.high:.2f}]")


def change(each: Interval) -> FormattedInterval:
    """Return a ratio as a change: 1.044 is +4.4 %."""
    return FormattedInterval(
        f"{signed(each.value)}\u00a0%", f"[{signed(each.low)},\u00a0{signed(each.high)}]"
    )


def percent(each: Interval) -> FormattedInterval:
    """Return a share: 0.31 is 31 %."""
    limits = minus(f"[{each.low * 100:.0f},\u00a0{each.high * 100:.0f}]")
    return FormattedInterval(minus(f"{each.value:.0%}").replace("%", "\u00a0%"), limits)


def signed(ratio: float) -> str:
    """Return a ratio as a change in percent, with its sign."""
    return minus(f"{ratio * 100 - 100:+.1f}")


def minus(text: str) -> str:
    """Return text with a minus sign in place of each hyphen."""
    return text.replace("-", "−")


PREFERRED = "10"  # ratio to begin with where none was measured


def ratios_of(report: Report) -> list[str]:
    """Return every ratio that has predictions, the measured one first."""
    ratios = set[str]()
    for data_set in report.data_sets:
        ratios |= {row.ratio for row in data_set.winners}
        for row in data_set.rules:
            ratios |= row.speedup.keys()
    return sorted(ratios, key=lambda ratio: -inf if ratio == MEASURED else float(ratio))


def preferred(ratios: Sequence[str]) -> str | None:
    """Return which of `ratios_of` a reader sees first: the measured one where there is one."""
    return PREFERRED if PREFERRED in ratios and MEASURED not in ratios else next(iter(ratios), None)


def first_ratio(report: Report) -> str | None:
    """Return the ratio that a reader sees first: that of the verdict."""
    return report.verdict.answer.ratio if report.verdict else preferred(ratios_of(report))


def main_data_set(report: Report) -> int | None:
    """Return which data set a reader sees first: the first of test prompts, else the first of
    all.
    """
    for number, data_set in enumerate(report.data_sets):
        if data_set.role == "test":
            return number
    return 0 if report.data_sets else None


def ratio_text(report: Report, ratio: str) -> str:
    """Return a ratio as a reader knows it: that of this machine with its number."""
    if ratio != MEASURED or report.ratio is None:
        return ratio
    return f"{report.ratio.value:.1f} ({MEASURED})"


def winners_at(data_set: DataSet, ratio: str | None) -> list[Winner]:
    """Return the winners at a ratio: those that a decoder could use, the fastest on dev prompts
    first, then the bounds.
    """
    winners = [row for row in data_set.winners if row.ratio == ratio]
    return sorted(winners, key=lambda row: (row.bound, -row.dev_speedup))


Row = TypeVar("Row", LiveRow, Winner)


def kind_of(row: LiveRow | Winner | Candidate) -> Kind:
    """Return what a setting is, for a reader who chooses."""
    if row.family == TARGET:
        return Kind.ALONE
    if row.rule_name == FIXED:
        return Kind.FIXED
    return Kind.HEADLESS if row.head is None else Kind.HEAD


def dev_speed(row: LiveRow | Winner) -> float:
    """Return a setting's speed-up on dev prompts; of one that was only decoded, on these."""
    return row.dev_speedup if isinstance(row, Winner) else row.speedup.value


def fastest_by_kind(rows: Iterable[Row]) -> dict[Kind, Row]:
    """Return the setting of each kind that was the fastest on dev prompts, the fastest of all
    first; bounds are left out.
    """
    found = dict[Kind, Row]()
    for row in sorted(rows, key=dev_speed, reverse=True):
        is_usable = row.lossless if isinstance(row, LiveRow) else not row.bound
        if is_usable:
            found.setdefault(kind_of(row), row)
    return found


def fastest_of(batches: BatchTable) -> BatchRow:
    """Return the setting that was the fastest in batches of one size, of those that keep the
    target's distribution.
    """
    lossless = [row for row in batches.rows if row.lossless]
    return max(lossless, key=lambda row: row.tokens_per_second)


def verdict_of(report: Report, uses: Mapping[str, str]) -> Verdict | None:
    """Return what to use: by replay, or by decoding where nothing was replayed.

    `uses` names by ratio the setting that dev prompts chose.
    """
    number = main_data_set(report)
    answers = dict[str, Comparison]()
    if number is not None:
        for ratio in ratios_of(report):
            if rows := winners_at(report.data_sets[number], ratio):
                answers[ratio] = _answer(ratio, rows, uses.get(ratio))
    elif report.live:
        answers[MEASURED] = _answer(MEASURED, report.live, None)
    main = preferred(list(answers))
    if main is None:
        return None
    answer = answers.pop(main)
    others = [*answers.values()]
    return Verdict(
        answer,
        others,
        [other.ratio for other in others if other.use != answer.use],
        _rests_on(report, main),
        _decoded(report, answer),
        _doubt(report),
    )


def _answer(ratio: str, rows: Sequence[Row], use: str | None) -> Comparison:
    """Return the answer that decoded or replayed settings give.

    `use` is the name of the one to use, None: the fastest.
    """
    fastest = fastest_by_kind(rows)
    choices = dict[Kind, ComparedSetting]()
    for kind, row in fastest.items():
        choices[kind] = ComparedSetting(row.name, row.speedup, row.gain)
    if Kind.ALONE not in choices:
        fixed = choices[Kind.FIXED].speedup
        gain = Interval(1 / fixed.value, 1 / fixed.high, 1 / fixed.low)
        choices[Kind.ALONE] = ComparedSetting(TARGET_ALONE.name, Interval(1, 1, 1), gain)
    order = sorted(
        choices, key=lambda kind: dev_speed(fastest[kind]) if kind in fastest else 1.0, reverse=True
    )
    used = next(iter(order))
    for kind in order:
        if choices[kind].name == use:
            used = kind
            break
    skip = None
    head = fastest.get(Kind.HEAD)
    if head is not None and used != Kind.HEAD and head.over_headless is not None:
        headless = [kind for kind in order if kind != Kind.HEAD]
        other = choices[next(iter(headless))].name
        skip = (
            f"on dev prompts it was not clearly faster than {other}; here it is"
            f" {change(head.over_headless)} against that"
        )
    return Comparison(ratio, used, {kind: choices[kind] for kind in Kind if kind in choices}, skip)


def _rests_on(report: Report, ratio: str) -> str:
    number = main_data_set(report)
    if number is None:
        prompts = report.context.get("num_live_prompts", "some")
        return f"Measured here on {prompts} prompts, the fastest of these same prompts."
    data = report.data_sets[number]
    text = (
        f"Replayed at ratio {ratio_text(report, ratio)} on {data.num_prompts} prompts of"
        f" {data.name}, chosen on dev prompts; "
    )
    if ratio != MEASURED or report.ratio is None:
        return f"{text}{counted_text(report, ratio)}."
    known = report.ratio
    return (
        f"{text}as timed here, a step of the target costs {known.value:.1f} draft steps"
        f" [{known.low:.1f}, {known.high:.1f}]."
    )


def _decoded(report: Report, answer: Comparison) -> list[str]:
    """Return what decoding says of the setting to use: its speed, next to the predicted one, and
    what another verification rule adds.
    """
    name = answer.choices[answer.use].name
    decoded = {row.name: row for row in report.live}
    if answer.ratio != MEASURED or not report.data_sets or name not in decoded:
        return []
    row = decoded[name]
    sentences = []
    if row.replayed_tokens_per_second is not None:
        predicted = row.replayed_tokens_per_second / row.tokens_per_second.value
        sentences.append(
            f"Decoded on {report.context.get('num_live_prompts', 'some')} of these prompts:"
            f" {times(row.speedup)} the target alone; predicted tokens per second were"
            f" {signed(predicted)}\u00a0% off."
        )
    for other in report.live:
        if other.same_rule == name and other.over_same_rule is not None:
            sentences.append(
                f"Under {other.verification} verification, its decoded rounds are"
                f" {change(other.over_same_rule)} faster."
            )
    return sentences


def faster_verification(report: Report, name: str) -> LiveRow | None:
    """Return the decoded row of another verification rule under which the setting of this name is
    clearly faster.
    """
    for row in report.live:
        if row.same_rule == name and is_clearly_faster(row.over_same_rule):
            return row
    return None


def _doubt(report: Report) -> str | None:
    """Return in a line why timing is unreliable."""
    for text in report.doubts:
        return f"{text[:1].lower()}{text[1:].removesuffix('.')}"
    return None


def use_text(answer: Comparison) -> str:
    """Return how fast the setting to use is: over the target alone, and over the best fixed
    length.
    """
    use = answer.choices[answer.use]
    others = [kind for kind in answer.choices if kind != Kind.ALONE]
    if answer.use == Kind.ALONE:
        if not others:
            return "Nothing else that was decoded keeps the target's distribution."
        best = max(others, key=lambda kind: answer.choices[kind].speedup.value)
        fastest = answer.choices[best]
        return (
            f"No setting was clearly faster on dev prompts; here {fastest.name} is"
            f" {times(fastest.speedup)} the target alone."
        )
    text = f"{times(use.speedup)} the target alone"
    if answer.use == Kind.FIXED:
        return (
            f"{text}; no rule is clearly faster than this fixed length."
            if len(others) > 1
            else f"{text}."
        )
    if use.gain is None:
        return f"{text}."
    return (
        f"{text}, {'' if use.gain.high > 1 else 'no gain: '}{change(use.gain)} over the best fixed"
        " length."
    )


def changes_text(report: Report, verdict: Verdict) -> str:
    """Return whether another ratio of costs changes the kind of the setting to use."""
    if not verdict.others:
        return "not known, no other was replayed"
    if not verdict.changes:
        same = ", ".join(ratio_text(report, each.ratio) for each in verdict.others)
        return f"no: at {same} it is the {verdict.answer.use}, too"
    changed = []
    for each in verdict.others:
        if each.ratio in verdict.changes:
            changed.append(f"at {ratio_text(report, each.ratio)} the {each.use}")
    return f"yes: {', '.join(changed)}"


def used_at(report: Report, ratio: str) -> str | None:
    """Return the name of the rule to use at a ratio; None where that is not known."""
    if report.verdict is not None:
        for answer in (report.verdict.answer, *report.verdict.others):
            if answer.ratio == ratio:
                return answer.choices[answer.use].name
    return None


def warnings_of(report: Report) -> list[str]:
    """Return what a reader should know: remarks on the prompts, and predictions that do not hold on
    them, with the remedy.
    """
    drifted = []
    for row in report.live:
        share = row.accepted_over_expected
        if share is not None and (share.low > 1 + LARGEST_DRIFT or share.high < 1 - LARGEST_DRIFT):
            drifted.append(
                f"Of the tokens that {row.name} expected to be accepted, {percent(share)} were, so"
                " its predictions do not hold on these prompts;"
                f" {REMEDY if row.head is not None else 'fit it again'}."
            )
    return [*report.notes, *drifted]


def information_text(known: Information) -> str:
    """Return how much of the uncertainty about acceptance can be known, and who explains how much
    of that.
    """
    shares = list[str]()
    for name, share in known.explained.items():
        shares.append(f"{name} {percent(share) if share.value > 0 else 'nothing'}")
    explained = ", ".join(shares)
    text = (
        f"{known.entropy.value:.3f} nats per drafted token, of which"
        f" {known.irreducible.value:.3f} are irreducible"
    )
    return f"{text} and {known.reducible.value:.3f} reducible; of these explain: {explained}"


def counted_text(report: Report, ratio: str) -> str:
    """Return which costs predicted speeds at one ratio count."""
    if ratio == MEASURED:
        return "costs as measured here"
    text = "verifying more tokens is free"
    return (
        f"{text}, heads’ costs are counted from their weights"
        if report.context.get("heads")
        else text
    )
