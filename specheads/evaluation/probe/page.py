"""The page of a probe: the answer, what was measured, and what each way to decode is predicted to be worth."""

from specheads.evaluation.page.document import Panel, context_section, rendered
from specheads.evaluation.page.tables import Cell, Row, Table, change_cell, times_cell
from specheads.evaluation.probe.probe import Probed
from specheads.evaluation.probe.report import measured, title_of

ABOUT = (
    "Speed-ups are predicted from recorded responses and from the steps as they were timed here; lengths and thresholds were "
    "chosen on one half of the prompts and counted on the other. Heads are not trained: they are taken to close as much of the "
    "way from the best fixed length to the informed ceiling as heads of the embedded pairs do, less what a head of random "
    "weights takes here. The better draft has its rejections turned into acceptances at random. In italics: bounds, which no "
    "decoder can reach."
)
COLUMNS = ("way to decode", "chosen", "speed-up", "over the fixed length")


def html_of(probed: Probed) -> str:
    """Return the page as text."""
    rows = []
    for option in probed.options:
        cells = [
            Cell(title_of(option), option.name),
            Cell(option.value or None),
            times_cell(option.speedup),
            change_cell(option.gain),
        ]
        rows.append(Row(cells, "best" if option.name == probed.answer.choice else "bound" if option.is_bound else ""))
    table = Table("Speed over the target alone, with 95 % intervals over prompts", COLUMNS, rows)
    section = {"key": "options", "title": "What each way to decode is worth", "template": "probe.html", "about": ABOUT}
    return rendered(
        {},
        title=f"Probe: {probed.pair}",
        doubts=probed.doubts,
        overview=measured(probed),
        findings_title="Answer",
        findings=[probed.answer.text, f"Next: {probed.answer.command}"],
        notes=probed.not_measured,
        data_sets=[],
        sections=[section | {"panels": [Panel({}, True, table)]}, *context_section(probed.context)],
    )
