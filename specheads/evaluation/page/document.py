"""A report as one HTML file that needs nothing else: what to use, coloured texts, interactive figures and tables.

Everything that a model or a config wrote reaches the page through templates that escape it; figures are JSON without a `<`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from specheads.evaluation.conclusions import (
    batches_text,
    changes_text,
    costs_text,
    information_text,
    main_data_set,
    preferred,
    ratio_text,
    ratios_of,
    use_text,
    warnings_of,
    winners_at,
)
from specheads.evaluation.page.figures import Figures, figures_of
from specheads.evaluation.report import Answer, Report, TextSample
from specheads.evaluation.tables import Table, bank_table, batch_table, live_table, verdict_table, winners_table

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
    figures, ratios, context = figures_of(report), ratios_of(report), report.context
    pair = " → ".join(str(context[key]) for key in ("draft", "target") if context.get(key))
    return rendered(
        figures,
        title=f"Speculative decoding: {context.get('model') or pair or 'evaluation'}",
        doubts=[] if report.verdict else report.doubts,
        notes=warnings_of(report),
        verdict=_verdict(report),
        data_sets=[f"{data_set.name} ({data_set.role})" for data_set in report.data_sets],
        main_set=main_data_set(report),
        ratios=[(ratio, ratio_text(report, ratio)) for ratio in ratios],
        main_ratio=_first_ratio(report),
        sections=sorted(_sections(report, figures), key=lambda each: (each["folded"], each["key"] == "speed")),
    )


def _first_ratio(report: Report) -> str | None:
    return report.verdict.answer.ratio if report.verdict else preferred(ratios_of(report))


def _verdict(report: Report) -> dict[str, Any] | None:
    """Return the values that the template of the verdict needs."""
    if (verdict := report.verdict) is None:
        return None

    def shown(answer: Answer) -> dict[str, Any]:
        name = answer.choices[answer.use].name
        bars = [(kind, choice.speedup, kind == answer.use) for kind, choice in answer.choices.items()]
        return {
            "use": name,
            "gain": use_text(answer),
            "skip": answer.skip_head,
            "bars": bars,
            "top": 1.02 * max(1.0, *(speedup.high for _, speedup, _ in bars)),
            "panel": Panel({"ratio": answer.ratio}, answer is verdict.answer, verdict_table(report, answer)),
        }

    return {
        "rests_on": verdict.rests_on,
        "doubt": verdict.doubt,
        "doubts": report.doubts,
        "changes": changes_text(report, verdict),
        "code": {"command": verdict.command, "Python": verdict.python} if verdict.command else {},
        "answers": [shown(answer) for answer in (verdict.answer, *verdict.others)],
    }


def rendered(figures: Mapping[str, Figures], verdict: Any = None, overview: Any = (), **content: Any) -> str:
    """Return a page with `figures`, by name, and what to use; `content` are the other values that page.html asks for."""
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
    selected = {"set": main_data_set(report), "ratio": _first_ratio(report)}

    def panel(table: Table, **values: Any) -> Panel:
        return Panel(values, all(selected[name] == value for name, value in values.items()), table)

    known = [f"{data.name}: {information_text(data.information)}." for data in report.data_sets if data.information]
    won = [(number, data, ratio) for number, data in sets for ratio in ratios if winners_at(data, ratio)]
    if won:
        panels = [panel(winners_table(report, data, ratio), set=number, ratio=ratio) for number, data, ratio in won]
        yield section("winners", "The best of each family", panels=panels)
    for name in figures:
        yield section(name, PLOTS[name], "plot.html", texts=known if name == "reliability" else [])
    if report.live:
        yield section("live", "Live measurements", texts=[costs_text(report.fit)] if report.fit else [], table=live_table(report))
    if report.batches:
        tables = [batch_table(report, each) for each in report.batches]
        yield section("batches", "Batches", texts=[] if report.doubts else [batches_text(report)], tables=tables)
    if report.bank:
        panels = [panel(bank_table(report, ratio), ratio=ratio) for ratio in report.bank[0].speedup]
        yield section("bank", "Heads compared", panels=panels)
    if report.texts:
        prompts: dict[str, list[TextSample]] = {}
        for sample in report.texts:
            prompts.setdefault(sample.prompt, []).append(sample)
        yield section("texts", "What became of each token", prompts=prompts)
    yield from context_section(report.context, _overview(report))


def section(key: str, title: str, template: str | None = None, **content: Any) -> dict[str, Any]:
    """Return a section of the page: its key, title and template with the values that this needs."""
    return {"key": key, "title": title, "template": template or f"{key}.html", "folded": key not in OPEN, **content}


def context_section(context: Mapping[str, Any], overview: Sequence[tuple[str, str]] = ()) -> Iterator[dict[str, Any]]:
    """Yield the section of the configuration, the versions and the rest of a context, if it has any, after an overview."""
    rest = {key: value for key, value in context.items() if key not in ("config", "versions")}
    parts = {
        "Resolved configuration": context.get("config"),
        "Versions": _yaml(context.get("versions")),
        "Context": _yaml(rest),
    }
    if shown := [(title, str(text)) for title, text in parts.items() if text]:
        yield section("context", "Configuration and versions", parts=shown, overview=overview)


def _yaml(content: object) -> str:
    plain = json.loads(json.dumps(content, default=str))  # paths and the like as text
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120) if plain else ""
