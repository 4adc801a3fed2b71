"""A report as one HTML file that needs nothing else: findings, tables, interactive figures and coloured texts.

Everything that a model or a config wrote reaches the page through templates that escape it; figures are JSON without a `<`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from specheads.evaluation.conclusions import key_findings, live_texts, main_data_set, preferred, ratio_text, ratios_of, winners_at
from specheads.evaluation.page.figures import Figures, figures_of
from specheads.evaluation.report import Report, TextSample
from specheads.evaluation.tables import Table, bank_table, batch_table, live_table, winners_table

PLOTS = {"pareto": "Discard rate against verification rate", "reliability": "Reliability"}  # titles of figures' sections


class Panel(NamedTuple):
    """A table of the page that is shown while its data set and ratio are selected."""

    values: Mapping[str, Any]  # set, ratio, or both
    shown: bool  # whether it is shown at first
    table: Table


def html_of(report: Report) -> str:
    """Return the page as text."""
    figures, ratios, context = figures_of(report), ratios_of(report), report.context
    pair = " → ".join(str(context[key]) for key in ("draft", "target") if context.get(key))
    number = main_data_set(report)
    return rendered(
        figures,
        title=f"Speculative decoding: {context.get('model') or pair or 'evaluation'}",
        doubts=report.doubts,
        overview=_overview(report),
        findings_title="Key findings" if number is None else f"Key findings, on {report.data_sets[number].name}",
        findings=key_findings(report),
        notes=report.notes,
        data_sets=[f"{data_set.name} ({data_set.role})" for data_set in report.data_sets],
        main_set=number,
        ratios=[(ratio, ratio_text(report, ratio)) for ratio in ratios],
        main_ratio=preferred(ratios),
        sections=list(_sections(report, figures)),
    )


def rendered(figures: Mapping[str, Figures], **content: Any) -> str:
    """Return a page with `figures`, by name; `content` are the values that page.html asks for."""
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
        **content,
    )


def _overview(report: Report) -> list[tuple[str, str]]:
    """Return what was evaluated, as names and texts."""
    context = report.context
    shown = {key: context.get(key) for key in ("target", "draft")}
    shown |= {
        "heads": ", ".join(context.get("heads") or []),
        "sampling": ", ".join(f"{key} {value}" for key, value in (context.get("warp") or {}).items() if value is not None),
    }
    shown |= {key: context.get(key) for key in ("seed", "device")}
    rows = [(key, str(value)) for key, value in shown.items() if value not in (None, "")]
    for data in report.data_sets:
        sizes = f"{data.num_prompts:,} prompts, {data.num_tokens:,} tokens, {data.num_samples} samples"
        rows.append(("data", f"{data.name} ({data.role}): {sizes}"))
    return rows


def _sections(report: Report, figures: Mapping[str, Figures]) -> Iterator[dict[str, Any]]:
    """Yield the sections of the report that are not empty, each with its template and the values that this needs."""
    sets, ratios = list(enumerate(report.data_sets)), ratios_of(report)
    selected = {"set": main_data_set(report), "ratio": preferred(ratios)}

    def panel(table: Table, **values: Any) -> Panel:
        return Panel(values, all(selected[name] == value for name, value in values.items()), table)

    won = [(number, data, ratio) for number, data in sets for ratio in ratios if winners_at(data, ratio)]
    if won:
        panels = [panel(winners_table(report, data, ratio), set=number, ratio=ratio) for number, data, ratio in won]
        yield section("winners", "The best of each family", panels=panels)
    for name in figures:
        yield section(name, PLOTS[name], "plot.html")
    if report.live:
        yield section("live", "Live measurements", texts=live_texts(report), table=live_table(report))
    if report.batches:
        yield section("batches", "Batches", tables=[batch_table(report, each) for each in report.batches])
    if report.bank:
        panels = [panel(bank_table(report, ratio), ratio=ratio) for ratio in report.bank[0].speedup]
        yield section("bank", "Heads compared", panels=panels)
    if report.texts:
        prompts: dict[str, list[TextSample]] = {}
        for sample in report.texts:
            prompts.setdefault(sample.prompt, []).append(sample)
        yield section("texts", "What became of each token", prompts=prompts)
    yield from context_section(report.context)


def section(key: str, title: str, template: str | None = None, **content: Any) -> dict[str, Any]:
    """Return a section of the page: its key, title and template with the values that this needs."""
    return {"key": key, "title": title, "template": template or f"{key}.html", **content}


def context_section(context: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the section of the configuration, the versions and the rest of a context, if it has any."""
    rest = {key: value for key, value in context.items() if key not in ("config", "versions")}
    parts = {
        "Resolved configuration": context.get("config"),
        "Versions": _yaml(context.get("versions")),
        "Context": _yaml(rest),
    }
    if shown := [(title, str(text)) for title, text in parts.items() if text]:
        yield section("context", "Configuration and versions", parts=shown)


def _yaml(content: object) -> str:
    plain = json.loads(json.dumps(content, default=str))  # paths and the like as text
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120) if plain else ""
