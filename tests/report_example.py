"""A made-up report with everything that a report can hold, and names that no page should take for
markup.
"""

import random
from dataclasses import replace

from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import StepTimes
from specheads.evaluation.answer import answer_of
from specheads.evaluation.report import (
    BatchRow,
    BatchTable,
    DataSet,
    LiveRow,
    Reliability,
    Report,
    RuleRow,
    TextSample,
    Winner,
)
from specheads.replay.intervals import Interval

RATIOS = ("measured", "5", "10", "20")
NASTY = "Say \"</script><b>bold</b>\" & 'quote' — naïve 日本語 {x} %{y}\nsecond line"
GRID = (0.1, 0.3, 0.5, 0.7, 0.9)
FAMILIES = {  # how much faster than the best fixed length at ratio 10, and the thresholds, if any
    "fixed_length": (1.0, None),
    "head_threshold shallow": (1.03, GRID),
    "head_threshold <deep>": (1.06, GRID),
    "logistic": (1.045, GRID),
    "logistic3": (1.04, GRID),
    "draft_product": (1.035, GRID),
    "max_probability": (1.01, GRID),
    "confidence": (0.99, (0.2, 0.4, 0.6)),
    "online_logistic": (0.9, None),
    "ceiling": (1.18, GRID),
    "oracle": (1.35, None),
}


def about(value: float, width: float = 0.02) -> Interval:
    return Interval(value, value - width * abs(value) - 0.002, value + width * abs(value) + 0.002)


def report_example() -> Report:
    """Return the same report every time."""
    rng = random.Random(0)
    sets = [
        _data_set(rng, "alpaca", "dev"),
        _data_set(rng, "mt-bench <test>", "test"),
        _data_set(rng, "gsm8k", "test"),
    ]
    context = {
        "model": "tiny & pair",
        "target": "meta-llama/Llama-3.1-8B-Instruct",
        "draft": "meta-llama/Llama-3.2-1B-Instruct",
        "heads": ["shallow", "<deep>"],
        "warp": {"temperature": 1.0, "top_k": None},
        "costs": {"head_shares": {"shallow": 0.1, "<deep>": 0.15}},
        "seed": 0,
        "device": "cpu",
        "split": "test",
        "final_parts": [],
        "prompts": {
            data.name: {
                "role": data.role,
                "num_prompts": data.num_prompts,
                "sha256": f"{number:016x}",
                "num_left_out": number,
            }
            for number, data in enumerate(sets)
        },
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "config": "seed: 0\nmodel:\n  name: <tiny>\n",
    }
    costs = StepCosts(0.0021, 0.0113, 0.00004, round_seconds=0.0002, verification=(0.0113, 0.0114))
    report = Report(
        context,
        StepTimes(costs, {"HeadThreshold of shallow": 0.0003}),
        ["The machine was <busy>."],
        ratio=Interval(5.4, 5.2, 5.5),
        live=_live(rng),
        data_sets=sets,
        batches=[_batches(size) for size in (1, 16)],
        texts=_texts(rng),
        notes=[
            "logistic, which needs no head, beats head_threshold shallow on gsm8k & elsewhere.",
            "Only 40 prompts: <wide> intervals.",
        ],
    )
    return with_answer(report)


def with_answer(report: Report) -> Report:
    """Return the report with the answer that its rows give, where a rule without a head is to be
    used at ratio 20.
    """
    answer = answer_of(report, {"20": "logistic 0.5"}, 40)
    if answer is not None:
        changes = {"command": "specheads generate 'x=<y>'", "python": "print('<y>')"}
        answer = replace(answer, **changes)
    return replace(report, answer=answer)


def _fields(family: str) -> dict[str, object]:
    rule, _, head = family.partition(" ")
    return {"rule_name": rule, "head": head or None, "bound": rule in ("ceiling", "oracle")}


def _data_set(rng: random.Random, name: str, role: str) -> DataSet:
    rules = [row for family in FAMILIES for row in _rules(rng, family)]
    predicts = ("head_threshold shallow", "head_threshold <deep>", "logistic", "draft's max_prob")
    curves = [
        _reliability(rng, name, bias)
        for name, bias in zip(predicts, (0.03, 0.0, 0.06, 0.15), strict=True)
    ]
    return DataSet(name, role, 80, 40_960, 16, rules, _winners(rules), curves)


def _rules(rng: random.Random, family: str) -> list[RuleRow]:
    factor, thresholds = FAMILIES[family]
    values = {"fixed_length": (1, 2, 3, 5, 8, 12)}.get(family, thresholds or (1,))
    key = "num_tokens" if family == "fixed_length" else "threshold" if thresholds else "start"
    title = {"fixed_length": "fixed K="}.get(family, family.replace("_", " ") + " ")
    rows = []
    for number, value in enumerate(values):
        place = (number + 0.5) / len(values)
        discard = about(2.0 * place**1.5 / factor**4 + 0.05, 0.05)
        verification = (0.62 - 0.33 * place**0.6) / factor
        lost = 0.5 * (place - 0.45) ** 2
        speedup = {
            ratio: about(factor * rng.gauss(1.7, 0.01) - lost - 0.3 / len(ratio))
            for ratio in RATIOS
        }
        rates = (discard, about(verification), 1 / verification, 0.7)
        names = (family, f"{title}{value}")
        given = {"parameters": {key: value}, **_fields(family)}
        rows.append(RuleRow(*names, *rates, speedup, **given))
    return rows


def _winners(rules: list[RuleRow]) -> list[Winner]:
    winners = []
    for ratio in RATIOS:
        tops: dict[str, RuleRow] = {}
        for rule in sorted(rules, key=lambda rule: rule.speedup[ratio].value):
            tops[rule.family] = rule
        fixed = tops["fixed_length"].speedup[ratio].value
        ceiling = tops["ceiling"].speedup[ratio].value
        for family in FAMILIES:
            speed = tops[family].speedup[ratio]
            gap = about((speed.value - fixed) / (ceiling - fixed), 0.25)
            gains = (about(speed.value / fixed, 0.015), None if family == "fixed_length" else gap)
            shares = (0.15,) if family.startswith("head") else ()
            winner = Winner(
                family,
                tops[family].name,
                ratio,
                speed,
                *gains,
                speed.value,
                *shares,
                **_fields(family),
            )
            winners.append(replace(winner, over_headless=about(1.01) if winner.head else None))
    return winners


def _reliability(rng: random.Random, predictor: str, bias: float) -> Reliability:
    predicted = [0.05 + 0.1 * index for index in range(10)]
    share = [0.02, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.12, 0.2, 0.38]
    observed = [min(1, p + bias * (1 - p) + rng.gauss(0, 0.01)) for p in predicted]
    return Reliability(predictor, share, predicted, observed, bias + 0.01, 0.85)


def _texts(rng: random.Random) -> list[TextSample]:
    text = (
        "The quick brown fox jumps over the lazy dog , and then it rests .\n Then a </pre> tag"
        " appears , quite harmless ."
    )
    words = [f" {word}" for word in text.split(" ") * 3]
    outcomes = ("accepted", "accepted", "accepted", "rejected", "target")
    samples = []
    for prompt in (NASTY, "Write a short story about a fox."):
        for rule in ("fixed_length(num_tokens=5)", "head_threshold <deep> 0.5"):
            kinds = rng.choices(outcomes, k=len(words))
            samples.append(TextSample(rule, prompt, list(zip(kinds, words, strict=True))))
    return samples


def _live(rng: random.Random) -> list[LiveRow]:
    rows = [_live_row("target alone", "target", 88.0, None)]
    for k in (1, 2, 3, 5, 8):
        speed = 120 + 6 * k - k**2 + rng.random()
        rows.append(_live_row(f"fixed_length(num_tokens={k})", "fixed_length", speed, None))
    for threshold in (0.3, 0.5, 0.7):
        speed = 135 - 30 * (threshold - 0.5) ** 2
        rows.append(_live_row(f"head {threshold:g}", "head_threshold", speed, 1.03))
    return [*rows, _live_row("<lossy> K=5", "typical", 160, None, lossless=False)]


def _live_row(
    name: str, family: str, speed: float, off: float | None, lossless: bool = True
) -> LiveRow:
    return LiveRow(
        name=name,
        family=family,
        rule_name=family,
        head="shallow" if family == "head_threshold" else None,
        verification=None if lossless else "typical",
        tokens_per_second=about(speed),
        speedup=about(speed / 88),
        discard_rate=about(0.4),
        verification_rate=about(0.35),
        block_efficiency=2.9,
        acceptance_rate=None if family == "target" else 0.71,
        milliseconds={"p50": 3.1, "p90": 18.4, "p99": 25.0},
        replayed_tokens_per_second=None if off is None else speed * off * 0.995,
        lossless=lossless,
        gain=about(speed / 130),
        over_headless=about(1.01) if family == "head_threshold" else None,
    )


def _batches(size: int) -> BatchTable:
    rows = []
    for name, family, speed in (
        ("target alone", "target", 1.0),
        ("fixed_length(num_tokens=3)", "fixed_length", 1.4),
        ("head <deep> 0.5", "head_threshold", 1.5),
    ):
        ratio = 1 + (speed - 1) / size**0.5
        rows.append(
            BatchRow(
                name=name,
                family=family,
                rule_name=family,
                lossless=True,
                tokens_per_second=80 * size**0.8 * ratio,
                over_alone=ratio,
                request_tokens_per_second=80 * size**-0.2 * ratio,
                speedup=about(ratio),
                token_ms={"p50": 9.0 * size, "p90": 30.0 * size, "p99": 60.0 * size},
                first_token_ms={"p50": 20.0 * size, "p90": 40.0 * size, "p99": 90.0 * size},
                tokens_per_round=1 + speed,
            )
        )
    return BatchTable(size, 32, rows)
