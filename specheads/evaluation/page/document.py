"""A report as one HTML file that needs nothing else: what to use, coloured texts, interactive
figures and tables.

Everything that a model or a config wrote reaches the page through templates that escape it; figures
are JSON without a `<`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from specheads.evaluation import conclusions
from specheads.evaluation.page.figures import Figures, figures_of
from specheads.evaluation.report import Report, TextSample, Verdict
from specheads.evaluation.tables import Table, batch_table, live_table, verdict_table, winners_table

PLOTS = {  # titles of figures' sections
    "speed": "Speed-up by threshold",
    "pareto": "Discard rate against verification rate",
    "reliability": "Reliability",
}
OPEN = ("texts", "speed", "options")  # sections that are not folded


class Panel(NamedTuple):
    """A table of the page that is shown while its data set and ratio are selected."""

    values: Mapping[str, Any]  # set, ratio, or both
    shown: bool  # whether it is shown at first
    table: Table


def html_of(report: Report) -> str:
    """Return the page as text."""
    figures = figures_of(report)
    ratios = conclusions.ratios_of(report)
    context = report.context
    verdict = report.verdict
    pair = " → ".join(str(context[key]) for key in ("draft", "target") if context.get(key))
    answers = [verdict.answer, *verdict.others] if verdict else []
    panels = [
        Panel({"ratio": each.ratio}, each is answers[0], verdict_table(report, each))
        for each in answers
    ]
    return rendered(
        figures,
        title=f"Speculative decoding: {context.get('model') or pair or 'evaluation'}",
        doubts=report.doubts,
        notes=conclusions.warnings_of(report),
        verdict=verdict,
        changes=conclusions.changes_text(report, verdict) if verdict else None,
        answers=[
            (answer, conclusions.use_text(answer), panel)
            for answer, panel in zip(answers, panels, strict=True)
        ],
        data_sets=[f"{data_set.name} ({data_set.role})" for data_set in report.data_sets],
        main_set=conclusions.main_data_set(report),
        ratios=[(ratio, conclusions.ratio_text(report, ratio)) for ratio in ratios],
        main_ratio=conclusions.first_ratio(report),
        sections=sorted(
            _sections(report, figures), key=lambda each: (each["folded"], each["key"] == "speed")
        ),
    )


def rendered(
    figures: Mapping[str, Figures],
    verdict: Verdict | None = None,
    overview: Any = (),
    **content: Any,
) -> str:
    """Return a page with `figures`, by name, and what to use.

    `content` are the other values that page.html asks for.
    """
    environment = Environment(
        loader=PackageLoader("specheads.evaluation.page", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        # Without a `<` no text within can end the script early.
        figures=Markup(to_json_plotly(figures).replace("<", "\\u003c")),
        plotly=Markup(get_plotlyjs()) if figures else "",
        verdict=verdict,
        overview=overview,
        **content,
    )


def _sections(report: Report, figures: Mapping[str, Figures]) -> Iterator[dict[str, Any]]:
    """Yield the sections of the report that are not empty, each with its template and the values
    that this needs.
    """
    sets = list(enumerate(report.data_sets))
    ratios = conclusions.ratios_of(report)
    selected = {"set": conclusions.main_data_set(report), "ratio": conclusions.first_ratio(report)}

    def panel(table: Table, **values: Any) -> Panel:
        return Panel(values, all(selected[name] == value for name, value in values.items()), table)

    known = [
        f"{data.name}: {conclusions.information_text(data.information)}."
        for data in report.data_sets
        if data.information
    ]
    won = [
        (number, data, ratio)
        for number, data in sets
        for ratio in ratios
        if conclusions.winners_at(data, ratio)
    ]
    if won:
        panels = [
            panel(winners_table(report, data, ratio), set=number, ratio=ratio)
            for number, data, ratio in won
        ]
        yield section("winners", "The best of each family", panels=panels)
    for name in figures:
        yield section(name, PLOTS[name], "plot.html", texts=known if name == "reliability" else [])
    if report.live:
        yield section("live", "Live measurements", table=live_table(report))
    if report.batches:
        yield section(
            "batches", "Batches", tables=[batch_table(report, each) for each in report.batches]
        )
    if report.texts:
        prompts: dict[str, list[TextSample]] = {}
        for sample in report.texts:
            prompts.setdefault(sample.prompt, []).append(sample)
        yield section("texts", "What became of each token", prompts=prompts)
    yield from context_section(report.context)


def section(key: str, title: str, template: str | None = None, **content: Any) -> dict[str, Any]:
    """Return a section of the page: its key, title and template with the values that this needs."""
    return {
        "key": key,
        "title": title,
        "template": template or f"{key}.html",
        "folded": key not in OPEN,
        **content,
    }


def context_section(context: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the section of the configuration, the versions and the rest of a context, if it has
    any.
    """
    plain = json.loads(
        json.dumps({key: value for key, value in context.items() if key != "config"}, default=str)
    )
    rest = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
    parts = {
        "Resolved configuration": context.get("config"),
        "Context and versions": rest if plain else None,
    }
    if shown := [(title, str(text)) for title, text in parts.items() if text]:
        yield section("context", "Configuration and versions", parts=shown)
