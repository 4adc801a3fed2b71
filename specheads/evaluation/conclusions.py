"""The answer and the further findings of a report as sentences."""

from collections.abc import Mapping
from typing import NamedTuple

from specheads.decoding.records import LARGEST_DRIFT, REMEDY
from specheads.errors import is_number
from specheads.evaluation.answer import (
    fastest_by_kind,
    main_data_set,
    preferred,
    ratios_of,
    winners_at,
)
from specheads.evaluation.candidates import TARGET
from specheads.evaluation.keys import MEASURED, Kind
from specheads.evaluation.report import (
    Answer,
    BatchRow,
    BatchTable,
    Comparison,
    Information,
    LiveRow,
    Report,
    RuleRow,
)
from specheads.replay.intervals import Interval


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


def first_ratio(report: Report) -> str | None:
    """Return the ratio that a reader sees first: that of the answer."""
    return report.answer.comparison.ratio if report.answer else preferred(ratios_of(report))


def ratio_text(report: Report, ratio: str) -> str:
    """Return a ratio as a reader knows it: that of this machine with its number."""
    if ratio != MEASURED or report.ratio is None:
        return ratio
    return f"{report.ratio.value:.1f} ({MEASURED})"


def fastest_of(batches: BatchTable) -> BatchRow:
    """Return the setting that was the fastest in batches of one size, of those that keep the
    target's distribution.
    """
    lossless = [row for row in batches.rows if row.lossless]
    return max(lossless, key=lambda row: row.tokens_per_second)


def facts_of(report: Report) -> dict[str, str]:
    """Return what a reader asks first of an evaluation, by name: how it sampled, where and when it
    ran, and how fast that was.
    """
    context = report.context
    facts = dict[str, str]()
    warp = context.get("warp")
    if isinstance(warp, Mapping):
        facts["sampling"] = warp_text(warp)
    for title, key in (("machine", "device"), ("date", "date")):
        if context.get(key):
            facts[title] = str(context[key])
    speeds = list[str]()
    for row in report.live:
        is_answer = report.answer is not None and row.name == report.answer.setting
        if row.family == TARGET or is_answer:
            speeds.append(f"{row.name} {row.tokens_per_second.value:,.0f}")
    if speeds:
        facts["tokens per second"] = ", ".join(speeds) + (", unreliable" * report.is_unreliable)
    number = main_data_set(report)
    rows: list[LiveRow | RuleRow] = [*report.live]
    if number is not None:
        rows += report.data_sets[number].rules
    used = next((row for row in rows if report.answer and row.name == report.answer.setting), None)
    if used is not None and used.acceptance_rate is not None:
        facts["acceptance rate"] = f"{used.acceptance_rate:.2f} of the drafted tokens"
        facts["tokens per forward pass of the target"] = f"{used.block_efficiency:.2f}"
    return facts


def warp_text(warp: Mapping[str, object]) -> str:
    """Return how tokens were sampled."""
    if warp.get("temperature") == 0:
        return "greedy"
    all_tokens = {"top_k": 0, "top_p": 1, "min_p": 0}
    words = list[str]()
    for name, value in warp.items():
        if is_number(value) and value != all_tokens.get(name):
            words.append(f"{name.replace('_', '-')} {value:g}")
    return ", ".join(words)


def use_text(comparison: Comparison) -> str:
    """Return how fast the setting to use is: over the target alone, and over the best fixed
    length.
    """
    setting = comparison.setting
    if comparison.use == Kind.ALONE:
        return "No setting is clearly faster than the target alone."
    text = f"{times(setting.speedup)} the target alone"
    if comparison.use == Kind.FIXED or setting.gain is None:
        return f"{text}."
    return (
        f"{text}, {'' if setting.gain.high > 1 else 'no gain: '}{change(setting.gain)} over the"
        " best fixed length."
    )


def tie_text(comparison: Comparison) -> str | None:
    """Return why the fastest setting on dev prompts is not the one to use; None where it is."""
    if not comparison.is_tie:
        return None
    fastest = comparison.choices[comparison.fastest].name
    here = ""
    if comparison.over_used is not None:
        here = f"; on these prompts it is {change(comparison.over_used)} against that"
    return (
        f"A tie, so the simplest: {fastest} was the fastest on dev prompts, but not clearly faster"
        f" than {comparison.setting.name}{here}."
    )


def evidence_text(answer: Answer) -> str:
    """Return what an answer rests on: the prompts, the machine, and how steps' costs are known."""
    evidence = answer.evidence
    if evidence.method == "decoding":
        return (
            f"Decoded on {evidence.num_prompts} prompts on {evidence.machine}, and chosen on these"
            " same prompts."
        )
    dev = f"{evidence.num_dev_prompts} " if evidence.num_dev_prompts else ""
    text = (
        f"Replayed on {evidence.num_prompts} prompts of {evidence.prompts}, chosen on {dev}dev"
        " prompts; "
    )
    known = evidence.ratio
    if known is None:
        return f"{text}costs are counted at cost ratio {answer.comparison.ratio}, not timed."
    return (
        f"{text}as timed on {evidence.machine}, a forward pass of the target costs"
        f" {known.value:.1f} draft steps [{known.low:.1f}, {known.high:.1f}]."
    )


def decoded_texts(answer: Answer) -> list[str]:
    """Return what decoding says of the setting to use: its speed, next to the predicted one, and
    what another verification rule adds.
    """
    row = answer.decoded
    if row is None or answer.evidence.method == "decoding":
        return []
    text = f"Decoded as a check: {row.tokens_per_second.value:,.0f} tokens/s"
    if answer.kind != Kind.ALONE:
        text += f", {times(row.speedup)} the target alone"
    if row.replayed_tokens_per_second is not None:
        predicted = row.replayed_tokens_per_second / row.tokens_per_second.value
        text += f"; predicted tokens per second were {signed(predicted)}\u00a0% off"
    sentences = [f"{text}."]
    other = answer.under_verification
    if other is not None and other.over_same_rule is not None:
        sentences.append(
            f"Under {other.verification} verification, its decoded rounds are"
            f" {change(other.over_same_rule)} faster."
        )
    return sentences


def disagreement_text(answer: Answer) -> str | None:
    """Return where replay and decoding disagree by more than their intervals; None where they do
    not.
    """
    if not answer.disagreements:
        return None
    text = f"Replay and decoding disagree: {'; '.join(answer.disagreements)}."
    if answer.doubts:
        return f"{text} The machine was busy; decode again on a quiet one."
    return f"{text} The answer rests on replay; num_live_prompts= decodes more prompts."


def doubt_text(answer: Answer) -> str | None:
    """Return why timing was unreliable, the first of its reasons; None where it was not."""
    for text in answer.doubts:
        return f"Timing unreliable here: {text[:1].lower()}{text[1:]}"
    return None


def changes_text(report: Report, answer: Answer) -> str:
    """Return whether another cost ratio changes the kind of the setting to use, and which costs are
    others there than those that were timed here.
    """
    if not answer.others:
        return "not known, no other was replayed"
    if not answer.changes:
        same = ", ".join(ratio_text(report, each.ratio) for each in answer.others)
        return f"no: at {same} it is the {answer.kind}, too"
    ratios = dict[Kind, list[str]]()
    for each in answer.changes:
        ratios.setdefault(each.use, []).append(ratio_text(report, each.ratio))
    changed = list[str]()
    for kind, known in ratios.items():
        *first, last = known
        listed = f"{', '.join(first)} and {last}" if first else last
        changed.append(f"at {listed} the {kind}")
    text = f"yes: {', '.join(changed)}"
    if answer.comparison.ratio != MEASURED:
        return text
    text += "; there verifying more tokens is free"
    counted = _head_share(report, answer.changes[0].ratio)
    timed = _head_share(report, MEASURED)
    if counted is None or timed is None:
        return f"{text}, here it is timed"
    return (
        f"{text} and a head adds {counted:.0%} to a draft step, counted from its weights, while"
        f" here it adds {timed:.0%} and both are timed"
    )


def _head_share(report: Report, ratio: str) -> float | None:
    """Return what the best head adds to a draft step at a ratio, as a share of the step."""
    number = main_data_set(report)
    if number is None:
        return None
    head = fastest_by_kind(winners_at(report.data_sets[number], ratio)).get(Kind.HEAD)
    return None if head is None else head.head_share


def used_at(report: Report, ratio: str) -> str | None:
    """Return the name of the setting to use at a ratio; None where that is not known."""
    if report.answer is not None:
        for comparison in (report.answer.comparison, *report.answer.others):
            if comparison.ratio == ratio:
                return comparison.setting.name
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
