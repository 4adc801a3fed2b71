"""`specheads plan`: what each stage takes for a pair on some GPUs, computed; `plan.json` where `out=` names a folder."""

from pathlib import Path
from textwrap import wrap

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from specheads.pair_config import pair_config
from specheads.plan import report
from specheads.plan.machine import Machine
from specheads.plan.models import PlannedPair
from specheads.plan.settings import PlanSettings
from specheads.plan.stages import Stage, plan
from specheads.settings import fields_of
from specheads.storage.files import write_json

WIDTH = 80
KEYS = {
    field.key: f"{field.help}{'' if field.default is None else f'; {field.default}'}" for field in fields_of(PlanSettings)
} | {"out": "a folder for plan.json"}


def planned(settings: PlanSettings) -> tuple[PlannedPair, Machine, list[Stage]]:
    """Return the pair, the machine and the stages; raises UserError for names that are not known and models that do not fit."""
    given = {"draft": settings.draft, "target": settings.target}
    config = pair_config(settings.model, **{key: value for key, value in given.items() if value is not None})
    machine, pair = Machine.of(settings), PlannedPair.of(config, settings.quantization)
    return pair, machine, plan(pair, machine, settings)


def print_plan(out: str | None = None, **keys: str) -> str:
    """Print the table of a plan; return what bounds the stages, the notes and the command lines.

    Raises:
        UserError: values that are not allowed, models that are not known or do not fit.
    """
    settings = PlanSettings(**{key: yaml.safe_load(value) for key, value in keys.items()})
    pair, machine, stages = planned(settings)
    table = Table(
        title=report.title(pair, machine, settings), title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for number, column in enumerate(report.columns(settings)):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in report.rows(stages, settings):
        table.add_row(*row)
    Console(width=WIDTH, highlight=False).print(table)
    lines = [*report.bounds(stages), "", *wrap(report.notes(machine, settings), WIDTH), "", *report.commands(stages)]
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "plan.json", report.as_json(pair, machine, settings, stages))
        lines += ["", f"{folder / 'plan.json'} written"]
    return "\n".join(lines)
