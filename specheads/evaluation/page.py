"""An evaluation as one HTML file that needs nothing else: findings, tables, interactive figures and coloured texts."""

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

import yaml
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from specheads.evaluation.figures import figures_of
from specheads.evaluation.findings import (
    change,
    change_limits,
    costs_text,
    fit_text,
    key_findings,
    main_data_set,
    preferred,
    ratio_text,
    ratios_of,
)
from specheads.evaluation.results import MEASURED, DataSet, Report, TextSample
from specheads.evaluation.tables import across_table, bank_table, drafts_table, live_table, winners_table
from specheads.storage.files import write_whole

# Whatever a text or a name may hold, the page fetches nothing.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
PLOTS = {  # title, what a reader should know, what selects the figure
    "pareto": (
        "Discard rate against verification rate",
        (
            "Each point is one rule with one set of parameters; lower left is better. The thin line joins the rules that a decoder could "
            "have and that no other beats in both rates. Click a family in the legend to show or hide it, double-click to see it alone."
        ),
        "set",
    ),
    "threshold": (
        "Speed-up against threshold",
        (
            "Rules that stop at a threshold. Horizontal lines: the best fixed length, the informed ceiling (the best constant threshold on "
            "the true acceptance probabilities) and the oracle (which knows every outcome)."
        ),
        "set ratio",
    ),
    "gap": (
        "Gap closed by rule",
        "How far each family’s best rule gets from the best fixed length (0 %) towards what no decoder can have (100 %). What lies beyond −100 % or 150 % is cut off.",
        "set ratio",
    ),
    "reliability": (
        "Reliability",
        (
            "Are tokens accepted as often as predicted? On the diagonal, yes. The larger a marker, the more tokens it stands for. A "
            "calibrated head is drawn twice, before and after calibration. A token counts once for every place that it can have in a round."
        ),
        "set",
    ),
    "positions": (
        "Acceptance by position in the round",
        "Of the tokens drafted at each position, the share that was accepted. Small markers: few tokens.",
        "set",
    ),
}
LIVE = (
    "By costs: from a setting’s own counts; by replay: from replayed counts; both at what its rule’s steps and rounds cost, in parentheses how far off. Discard and "
    "verification rates are per token, latencies in milliseconds per token. Click a heading to sort."
)
DRAFTS = (
    "Each draft with the best fixed length, the best rule without a head and the best with one, chosen on dev prompts. A cost ratio is that of "
    "each draft itself: a smaller draft reaches a larger one. Decoded speeds were measured in runs of their own."
)
BANK = (
    "Each head’s threshold was chosen on dev prompts, at each cost ratio again; the speed-up is on test prompts. A head’s cost is what it adds "
    "to a draft step, as a share of the step, and is counted; at its break-even it would be as fast as the best fixed length. Click a heading to sort."
)
KINDS = {
    "accepted": "drafted and accepted",
    "rejected": "drafted and thrown away",
    "target": "the target’s own",
}


def write_page(report: Report, path: Path) -> None:
    """Write `report` to `path` as one HTML file."""
    page = html_of(report)
    write_whole(path, lambda temporary: temporary.write_text(page, encoding="utf-8"))


def html_of(report: Report) -> str:
    """Return the page as text."""
    figures, name = figures_of(report), escape(_title(report))
    sections = {
        **_winners(report),
        **_plots(figures),
        **_live(report),
        **_bank(report),
        **_drafts(report),
        **_texts(report),
        **_context(report),
    }
    links = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, (title, _) in sections.items())
    body = "".join(f'<section id="{key}"><h2>{escape(title)}</h2>{inner}</section>' for key, (title, inner) in sections.items())
    return "\n".join(
        (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"><title>{name}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">',
            f"<style>\n{_resource('page.css')}</style>\n</head>\n<body>",
            f'<header class="head"><h1>{name}</h1>{_list("doubts", "What was measured is not to be trusted", report.doubts)}',
            f"{_facts(report)}{_list('findings', _findings_title(report), key_findings(report))}",
            f'{_list("notes", "Notes", report.notes)}<nav aria-label="Sections"><ul>{links}</ul></nav></header>',
            _selectors(report),
            f"<main>{body}</main>",
            f'<script type="application/json" id="figures">{_json(figures)}</script>',
            f"<script>{get_plotlyjs()}</script>" if figures else "",
            f"<script>\n{_resource('page.js')}</script>\n</body>\n</html>\n",
        )
    )


def _resource(name: str) -> str:
    return files("specheads.evaluation").joinpath(name).read_text(encoding="utf-8")


def _json(figures: object) -> str:
    return to_json_plotly(figures).replace("<", "\\u003c")


def _title(report: Report) -> str:
    context = report.context
    pair = " → ".join(str(context[key]) for key in ("draft", "target") if context.get(key))
    return f"Speculative decoding: {context.get('model') or pair or 'evaluation'}"


def _facts(report: Report) -> str:
    context = report.context
    warp = context.get("warp") or {}
    shown = {key: context.get(key) for key in ("target", "draft")}
    shown |= {
        "heads": ", ".join(context.get("heads") or []),
        "sampling": ", ".join(f"{key} {value}" for key, value in warp.items() if value is not None),
    }
    shown |= {key: context.get(key) for key in ("seed", "device")} | {"costs": costs_text(report).replace(" %", "\u00a0%")}
    sets = [
        f"{one.name} ({one.role}): {one.num_prompts:,} prompts, {one.num_tokens:,} tokens, {one.num_samples} draws"
        for one in report.data_sets
    ]
    rows = [*((key, value) for key, value in shown.items() if value not in (None, "")), *(("data", text) for text in sets)]
    return f'<dl class="facts">{"".join(f"<div><dt>{key}</dt><dd>{escape(str(value))}</dd></div>" for key, value in rows)}</dl>'


def _findings_title(report: Report) -> str:
    number = main_data_set(report)
    return "Key findings" if number is None else f"Key findings, on {report.data_sets[number].name}"


def _list(kind: str, title: str, texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<div class="{kind}"><h2>{escape(title)}</h2><ul>{items}</ul></div>' if items else ""


def _selectors(report: Report) -> str:
    ratios, number = ratios_of(report), main_data_set(report)
    options = "".join(
        f'<option value="{i}"{" selected" if i == number else ""}>{escape(one.name)} ({escape(one.role)})</option>'
        for i, one in enumerate(report.data_sets)
    )
    choices = "".join(
        f'<label><input type="radio" name="ratio" data-select="ratio" value="{escape(ratio)}"'
        f"{' checked' if ratio == preferred(ratios) else ''}><span>{escape(ratio_text(report, ratio))}</span></label>"
        for ratio in ratios
    )
    if not report.data_sets:
        return ""
    sets = f'<label>data set <select data-select="set" autocomplete="off">{options}</select></label>'
    title = "how many draft steps a forward pass of the target costs"
    ratio = (
        f'<fieldset title="{title}"><legend>cost ratio</legend><div class="choice">{choices}</div></fieldset>' if ratios else ""
    )
    return f'<div class="bar"><form autocomplete="off" aria-label="What is shown">{sets}{ratio}</form></div>'


def _winners(report: Report) -> dict[str, tuple[str, str]]:
    if not any(data_set.winners for data_set in report.data_sets):
        return {}
    ratios = ratios_of(report)
    first = (main_data_set(report), preferred(ratios))
    panels = "".join(
        _panel(_greyed(report, ratio, winners_table(report, data_set, ratio)), (i, ratio) == first, set=i, ratio=ratio)
        for i, data_set in enumerate(report.data_sets)
        for ratio in ratios
        if any(row.ratio == ratio for row in data_set.winners)
    )
    across = _ratio_panels(report, ratios, across_table)
    about = (
        "Each family’s rule was chosen on dev prompts, at each cost ratio again (how many draft steps a forward pass of the target costs). "
        "A head’s cost is what it adds to a draft step, as a share of the step, and is counted; at its break-even the rule would be as fast "
        "as the best fixed length. Brackets hold 95 % intervals over prompts. In italics: what no decoder can have. The informed ceiling "
        "is the best constant threshold on the true acceptance probabilities, the oracle knows every outcome, and neither pays for it."
    )
    inner = f'<p class="about">{about}</p><div class="names">{panels}</div>{across if len(report.data_sets) > 1 else ""}'
    return {"winners": ("The best of each family", inner)}


def _greyed(report: Report, ratio: str, inner: str) -> str:
    """Return a table at a ratio, greyed where it is the measured one and what was measured is not to be trusted."""
    return f'<div class="doubtful">{inner}</div>' if report.doubts and ratio == MEASURED else inner


def _panel(inner: str, shown: bool, **selection: object) -> str:
    data = "".join(f' data-{name}="{escape(str(value))}"' for name, value in selection.items())
    return f'<div class="panel"{data}{"" if shown else " hidden"}>{inner}</div>'


def _plots(figures: Iterable[str]) -> dict[str, tuple[str, str]]:
    found = {}
    for name in figures:
        title, about, by = PLOTS[name]
        below = ' data-legend="below"' if name == "gap" else ""
        shape = " square" if name == "reliability" else ""
        plot = (
            f'<div class="plot{shape}" data-figure="{name}" data-by="{by}"{below} role="img" aria-label="{escape(title)}"></div>'
        )
        found[name] = (
            title,
            f'<p class="about">{about}</p>{plot}<p class="about" hidden>Nothing to show for this selection.</p>',
        )
    return found


def _live(report: Report) -> dict[str, tuple[str, str]]:
    if not report.live:
        return {}
    gains = {ratio: gain for ratio, gain in report.gains.items() if gain}
    texts = [fit_text(report)] if report.fit else []
    if gains:
        each = [
            f"{change(g)} {change_limits(g)} at {'the measured ratio' if r == MEASURED else f'ratio {r}'}"
            for r, g in gains.items()
        ]
        texts.append(f"The live head over the best live fixed length, cross-fitted: {'; '.join(each)}.")
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in texts)
    kind = "doubtful" if report.doubts else ""
    return {
        "live": ("Live measurements", f'<div class="{kind}">{paragraphs}<p class="about">{LIVE}</p>{live_table(report)}</div>')
    }


def _bank(report: Report) -> dict[str, tuple[str, str]]:
    if not report.bank:
        return {}
    ratios = [ratio for ratio in ratios_of(report) if any(ratio in row.speedup for row in report.bank)]
    return {"bank": ("Heads compared", f'<p class="about">{BANK}</p>{_ratio_panels(report, ratios, bank_table)}')}


def _drafts(report: Report) -> dict[str, tuple[str, str]]:
    if not report.drafts:
        return {}
    ratios = [ratio for ratio in ratios_of(report) if any(ratio in row.speedup for row in report.drafts)]
    inner = f'<p class="about">{DRAFTS}</p><div class="names">{_ratio_panels(report, ratios, drafts_table)}</div>'
    return {"drafts": ("Drafts compared", inner)}


def _ratio_panels(report: Report, ratios: Sequence[str], table_of: Callable[[Report, str], str]) -> str:
    """Return a table for every ratio, of which the page shows the one that is selected."""
    first = preferred(ratios)
    return "".join(_panel(_greyed(report, ratio, table_of(report, ratio)), ratio == first, ratio=ratio) for ratio in ratios)


def _texts(report: Report) -> dict[str, tuple[str, str]]:
    if not any(data_set.texts for data_set in report.data_sets):
        return {}
    legend = " ".join(f"{_piece(kind, title)}" for kind, title in KINDS.items())
    panels = "".join(_panel(_samples(one), i == main_data_set(report), set=i) for i, one in enumerate(report.data_sets))
    return {"texts": ("What became of each token", f'<p class="response-legend">{legend}</p>{panels}')}


def _samples(data_set: DataSet) -> str:
    """Return a data set's responses, those to the same prompt side by side."""
    if not data_set.texts:
        return '<p class="about">No texts were kept of this data set.</p>'
    prompts: dict[str, list[TextSample]] = {}
    for sample in data_set.texts:
        prompts.setdefault(sample.prompt, []).append(sample)
    return "".join(
        f'<h3>Prompt {number}</h3><div class="prompt" tabindex="0">{escape(prompt)}</div>'
        f'<div class="responses">{"".join(map(_response, samples))}</div>'
        for number, (prompt, samples) in enumerate(prompts.items(), 1)
    )


def _response(sample: TextSample) -> str:
    pieces = "".join(_piece(kind, text) for kind, text in sample.pieces)
    return f'<article><h4>{escape(sample.rule)}</h4><div class="response" tabindex="0">{pieces}</div></article>'


def _piece(kind: str, text: str) -> str:
    """Return a piece of a response; newlines are shown as signs too, and rejected ones, which break no line, as signs only."""
    tag = "del" if kind == "rejected" else "span"
    newline = '<span class="newline" aria-hidden="true">↵</span>' + ("" if kind == "rejected" else "\n")
    shown = escape(text).replace("\n", newline)
    return f'<{tag} class="piece {escape(kind)}">{shown}</{tag}>'


def _context(report: Report) -> dict[str, tuple[str, str]]:
    rest = {key: value for key, value in report.context.items() if key not in ("config", "versions")}
    parts = {
        "Resolved configuration": report.context.get("config"),
        "Versions": _yaml(report.context.get("versions")),
        "Context": _yaml(rest),
    }
    inner = "".join(
        f"<details><summary>{title}</summary><pre>{escape(str(text))}</pre></details>" for title, text in parts.items() if text
    )
    return {"context": ("Configuration and versions", inner)} if inner else {}


def _yaml(content: object) -> str:
    plain = json.loads(json.dumps(content, default=str))  # paths and the like as text
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120) if plain else ""
