"""A report as one HTML file that needs nothing else: what to use, coloured texts, interactive
figures and tables.

Everything that a model or a config wrote reaches the page through templates that escape it; figures
are JSON without a `<`.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from specheads.evaluation import conclusions
from specheads.evaluation.answer import main_data_set, ratios_of, winners_at
from specheads.evaluation.report import Answer, Comparison, Report, TextSample
from specheads.evaluation.tables import answer_table, batch_table, live_table, winners_table
from specheads.table import Table

PLOTS = {  # titles of figures' sections
    "speed": "Speed-up by threshold",
    "pareto": "Discard rate against verification rate",
    "reliability": "Reliability",
}
OPEN = ("texts", "speed")  # sections that are not folded

Section = Mapping[str, object]  # its key, its title, its template and the values that this needs


@dataclass(frozen=True)
class Panel:
    """A table of the page that is shown while its data set and ratio are selected."""

    values: Mapping[str, object]  # set, ratio, or both
    shown: bool  # whether it is shown at first
    table: Table


@dataclass(frozen=True)
class Drawn:
    """The figures of a page: their names, all of them as JSON, and the script that draws them."""

    names: Collection[str] = ()
    figures: str = "{}"
    script: str = ""


def html_of(report: Report) -> str:
    """Return the page as text."""
    context = report.context
    answer = report.answer
    models = [str(context[role]) for role in ("draft", "target") if context.get(role)]
    comparisons: list[tuple[Comparison, str, str | None, Panel]] = []
    for each in [answer.comparison, *answer.others] if answer else []:
        panel = Panel({"ratio": each.ratio}, not comparisons, answer_table(report, each))
        use = conclusions.use_text(each)
        comparisons.append((each, use, conclusions.tie_text(each), panel))
    drawn = _drawn(report)
    ratios = list[tuple[str, str]]()  # with what a reader calls them
    for ratio in ratios_of(report):
        ratios.append((ratio, conclusions.ratio_text(report, ratio)))
    environment = Environment(
        loader=PackageLoader("specheads.evaluation.page", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        figures=drawn.figures,
        plotly=drawn.script,
        title=f"Speculative decoding: {context.get('model') or ' → '.join(models) or 'evaluation'}",
        doubts=report.doubts,
        notes=conclusions.warnings_of(report),
        sections=list(_sections(report, drawn.names)),
        facts=conclusions.facts_of(report),
        answer=answer,
        comparisons=comparisons,
        evidence=_evidence(answer),
        disagreement=conclusions.disagreement_text(answer) if answer else None,
        doubt=conclusions.doubt_text(answer) if answer else None,
        changes=conclusions.changes_text(report, answer) if answer else None,
        data_sets=[f"{data_set.name} ({data_set.role})" for data_set in report.data_sets],
        main_set=main_data_set(report),
        ratios=ratios,
        main_ratio=conclusions.first_ratio(report),
    )


def _evidence(answer: Answer | None) -> list[str]:
    """Return what an answer rests on, and what decoding says of it."""
    if answer is None:
        return []
    return [conclusions.evidence_text(answer), *conclusions.decoded_texts(answer)]


def _drawn(report: Report) -> Drawn:
    """Return the figures of a report; none where plotly is not installed."""
    if find_spec("plotly") is None:
        return Drawn()
    from plotly.io.json import to_json_plotly
    from plotly.offline import get_plotlyjs

    from specheads.evaluation.page.figures import figures_of

    figures = figures_of(report)
    # Without a `<` no text within can end the script early.
    text = to_json_plotly(figures).replace("<", "\\u003c")
    script = get_plotlyjs() if figures else ""
    return Drawn(figures.keys(), Markup(text), Markup(script))


def _sections(report: Report, figures: Collection[str]) -> Iterator[Section]:
    """Yield the sections of the report that are not empty, those that are open first."""
    if report.texts:
        prompts: dict[str, list[TextSample]] = {}
        for sample in report.texts:
            prompts.setdefault(sample.prompt, []).append(sample)
        yield _section("texts", "What became of each token", prompts=prompts)
    if "speed" in figures:
        yield _plot("speed")
    if panels := _winners(report):
        yield _section("winners", "The best of each family", panels=panels)
    if "pareto" in figures:
        yield _plot("pareto")
    if "reliability" in figures:
        known = list[str]()
        for data in report.data_sets:
            if data.information:
                known.append(f"{data.name}: {conclusions.information_text(data.information)}.")
        yield _plot("reliability", known)
    if report.live:
        yield _section("live", "Live measurements", table=live_table(report))
    if report.batches:
        tables = [batch_table(report, batches) for batches in report.batches]
        yield _section("batches", "Batches", tables=tables)
    if report.context:
        yield _context(report.context)


def _plot(name: str, texts: Sequence[str] = ()) -> Section:
    return _section(name, PLOTS[name], "plot.html", texts=texts)


def _winners(report: Report) -> list[Panel]:
    """Return a table of the best of each family for each data set and ratio."""
    main_set = main_data_set(report)
    main_ratio = conclusions.first_ratio(report)
    panels = []
    for number, data in enumerate(report.data_sets):
        for ratio in ratios_of(report):
            if winners_at(data, ratio):
                shown = number == main_set and ratio == main_ratio
                table = winners_table(report, data, ratio)
                panels.append(Panel({"set": number, "ratio": ratio}, shown, table))
    return panels


def _section(key: str, title: str, template: str | None = None, **content: object) -> Section:
    """Return a section of the page: its key, title and template with the values that this needs."""
    return {
        "key": key,
        "title": title,
        "template": template or f"{key}.html",
        "folded": key not in OPEN,
        **content,
    }


def _context(context: Mapping[str, object]) -> Section:
    """Return the section of the configuration, the versions and the rest of a context."""
    rest = {key: value for key, value in context.items() if key != "config"}
    plain = json.loads(json.dumps(rest, default=str))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
    parts = {
        "Resolved configuration": str(context.get("config", "")),
        "Context and versions": text,
    }
    return _section("context", "Configuration and versions", parts=parts)
