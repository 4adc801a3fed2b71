"""A report as one HTML file that needs nothing else: findings, tables, interactive figures and coloured texts.

Everything that a model or a config wrote reaches the page through templates that escape it; figures are JSON without a `<`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from specheads.evaluation.conclusions import (
    costs_text,
    key_findings,
    live_texts,
    main_data_set,
    preferred,
    ratio_text,
    ratios_of,
)
from specheads.evaluation.page.figures import ALL, Figures, figures_of, loads_of
from specheads.evaluation.report import MEASURED, Report, TextSample
from specheads.evaluation.tables import (
    ABOUT_QUALITY,
    QUALITY_TITLE,
    Table,
    across_table,
    bank_table,
    batch_table,
    comparisons,
    divergence_table,
    drafts_table,
    live_table,
    loads_table,
    quality_table,
    winners_table,
)
from specheads.storage.files import write_whole

PLOTS = {  # by figure, the title of its section, and the selectors that it depends on
    "pareto": ("Discard rate against verification rate", "set"),
    "threshold": ("Speed-up against threshold", "set ratio"),
    "gap": ("Gap closed by rule", "set ratio"),
    "reliability": ("Reliability", "set"),
    "positions": ("Acceptance by position in the round", "set"),
}


@dataclass(frozen=True)
class Panel:
    """A part of the page that is shown while its data set and ratio are selected."""

    values: Mapping[str, Any]  # set, ratio, or both; or load
    shown: bool  # at first
    table: Table | None = None
    doubtful: bool = False
    prompts: Mapping[str, Sequence[TextSample]] = field(default_factory=dict)  # the responses to each


def write_page(report: Report, path: Path) -> None:
    """Write `report` to `path` as one HTML file."""
    page = html_of(report)
    write_whole(path, lambda temporary: temporary.write_text(page, encoding="utf-8"))


def html_of(report: Report) -> str:
    """Return the page as text."""
    figures, ratios = figures_of(report), ratios_of(report)
    return rendered(
        figures,
        title=_title(report),
        doubts=report.doubts,
        overview=_overview(report),
        findings_title=_findings_title(report),
        findings=key_findings(report),
        notes=report.notes,
        data_sets=[f"{data_set.name} ({data_set.role})" for data_set in report.data_sets],
        main_set=main_data_set(report),
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
        figures=_json(figures),
        plotly=Markup(get_plotlyjs()) if figures else "",
        style=Markup(resource("page.css")),
        script=Markup(resource("page.js")),
        **content,
    )


def resource(name: str) -> str:
    """Return the text of a file next to this one."""
    return files("specheads.evaluation.page").joinpath(name).read_text(encoding="utf-8")


def _json(figures: object) -> Markup:
    """Return figures as JSON that no text within can end early: without a `<` there is no `</script>`."""
    return Markup(to_json_plotly(figures).replace("<", "\\u003c"))


def _title(report: Report) -> str:
    context = report.context
    pair = " → ".join(str(context[key]) for key in ("draft", "target") if context.get(key))
    return f"Speculative decoding: {context.get('model') or pair or 'evaluation'}"


def _overview(report: Report) -> list[tuple[str, str]]:
    """Return what was evaluated, as names and texts."""
    context = report.context
    shown = {key: context.get(key) for key in ("target", "draft")}
    shown |= {
        "heads": ", ".join(context.get("heads") or []),
        "sampling": ", ".join(f"{key} {value}" for key, value in (context.get("warp") or {}).items() if value is not None),
    }
    shown |= {key: context.get(key) for key in ("seed", "device")} | {"costs": costs_text(report).replace(" %", "\u00a0%")}
    rows = [(key, str(value)) for key, value in shown.items() if value not in (None, "")]
    for data in report.data_sets:
        sizes = f"{data.num_prompts:,} prompts, {data.num_tokens:,} tokens, {data.num_samples} samples"
        rows.append(("data", f"{data.name} ({data.role}): {sizes}"))
    return rows


def _findings_title(report: Report) -> str:
    number = main_data_set(report)
    return "Key findings" if number is None else f"Key findings, on {report.data_sets[number].name}"


def _sections(report: Report, figures: Mapping[str, Figures]) -> Iterator[dict[str, Any]]:
    """Yield the sections of the report that are not empty, each with its template and the values that this needs."""
    if any(data_set.winners for data_set in report.data_sets):
        across = _ratio_panels(report, ratios_of(report), across_table) if len(report.data_sets) > 1 else []
        winners = {"panels": _winner_panels(report), "across": across}
        yield {"key": "winners", "title": "The best of each family", "template": "winners.html", **winners}
    for name in (name for name in figures if name in PLOTS):
        title, by = PLOTS[name]
        yield {"key": name, "title": title, "template": "plot.html", "by": by}
    if report.live:
        live = {"texts": live_texts(report), "table": live_table(report)}
        yield {"key": "live", "title": "Live measurements", "template": "live.html", **live}
        if quality := quality_table(report):
            shown = {"texts": [ABOUT_QUALITY, *comparisons(report)], "tables": [quality]}
            yield {"key": "quality", "title": QUALITY_TITLE, "template": "quality.html", **shown}
    if report.batches:
        loads, doubtful = loads_of(report), bool(report.doubts)
        panels = [Panel({"load": ALL}, True, loads_table(report, loads), doubtful)]
        panels += [Panel({"load": n}, False, batch_table(report, each), doubtful) for n, each in enumerate(report.batches)]
        choices = [(ALL, "all"), *((str(number), load) for number, load in enumerate(loads))]
        batches = {"choices": choices, "panels": panels}
        yield {"key": "batches", "title": "Batches", "template": "batches.html", **batches}
    if report.bank:
        ratios = [ratio for ratio in ratios_of(report) if any(ratio in row.speedup for row in report.bank)]
        tables = _ratio_panels(report, ratios, bank_table)
        heads = {"panels": tables, "divergences": divergence_table(report)}
        yield {"key": "bank", "title": "Heads compared", "template": "bank.html", **heads}
    if report.drafts:
        ratios = [ratio for ratio in ratios_of(report) if any(ratio in row.speedup for row in report.drafts)]
        tables = _ratio_panels(report, ratios, drafts_table)
        yield {"key": "drafts", "title": "Drafts compared", "template": "drafts.html", "panels": tables}
    if any(data_set.texts for data_set in report.data_sets):
        texts = _text_panels(report)
        yield {"key": "texts", "title": "What became of each token", "template": "texts.html", "panels": texts}
    yield from context_section(report.context)


def _winner_panels(report: Report) -> list[Panel]:
    ratios = ratios_of(report)
    first = (main_data_set(report), preferred(ratios))
    return [
        Panel(
            {"set": number, "ratio": ratio},
            (number, ratio) == first,
            winners_table(report, data_set, ratio),
            _is_doubtful(report, ratio),
        )
        for number, data_set in enumerate(report.data_sets)
        for ratio in ratios
        if any(row.ratio == ratio for row in data_set.winners)
    ]


def _ratio_panels(report: Report, ratios: Sequence[str], table_of: Callable[[Report, str], Table]) -> list[Panel]:
    """Return a table for every ratio; the page shows that of the selected one."""
    first = preferred(ratios)
    return [Panel({"ratio": ratio}, ratio == first, table_of(report, ratio), _is_doubtful(report, ratio)) for ratio in ratios]


def _is_doubtful(report: Report, ratio: str) -> bool:
    """Whether a table at a ratio is greyed: at the measured one if measured figures are not to be trusted."""
    return bool(report.doubts) and ratio == MEASURED


def _text_panels(report: Report) -> list[Panel]:
    """Return the responses of each data set, by prompt."""
    panels = []
    for number, data_set in enumerate(report.data_sets):
        prompts: dict[str, list[TextSample]] = {}
        for sample in data_set.texts:
            prompts.setdefault(sample.prompt, []).append(sample)
        panels.append(Panel({"set": number}, number == main_data_set(report), prompts=prompts))
    return panels


def context_section(context: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the section of the configuration, the versions and the rest of a context, if it has any."""
    rest = {key: value for key, value in context.items() if key not in ("config", "versions")}
    parts = {
        "Resolved configuration": context.get("config"),
        "Versions": _yaml(context.get("versions")),
        "Context": _yaml(rest),
    }
    if shown := [(title, str(text)) for title, text in parts.items() if text]:
        yield {"key": "context", "title": "Configuration and versions", "template": "context.html", "parts": shown}


def _yaml(content: object) -> str:
    plain = json.loads(json.dumps(content, default=str))  # paths and the like as text
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120) if plain else ""
