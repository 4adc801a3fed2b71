"""The tables of a simulation on the console and as files, and the Pareto front of total throughput against speed per user."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from specheads.evaluation.intervals import Interval
from specheads.evaluation.report_files import write_rows
from specheads.evaluation.serving.study import LoadTable, PolicyRow
from specheads.storage.files import write_json, write_whole

NAME = "load"
COLUMNS = (
    *("tokens/s\nover fixed K", "per\nuser", "ms/token\nhalf\n99 %", "first ms\nhalf\n99 %"),
    *("block eff.\ndiscarded", "draft steps\nsubmitted"),
)


def print_tables(tables: Sequence[LoadTable], title: str, console: Console | None = None) -> None:
    """Print a table for every load, and where speculation stops paying."""
    console = console or Console()
    for table in tables:
        console.print(_table(table, title))
    for text in conclusions(tables):
        console.print(text, highlight=False)


def _table(table: LoadTable, title: str) -> Table:
    printed = Table(title=f"{title}: {table.load}", pad_edge=False, collapse_padding=True, box=box.SIMPLE_HEAD)
    printed.add_column("policy\nand value")
    for column in COLUMNS:
        printed.add_column(column, justify="right", no_wrap=True)
    for row in table.rows:
        printed.add_row(*_cells(row))
    return printed


def _cells(row: PolicyRow) -> list[str]:
    numbers = row.numbers
    half = 100 * (row.over_fixed.high - row.over_fixed.low) / 2
    return [
        "\n".join([row.family, " ".join(f"{number:g}" for number in row.value)]).rstrip(),
        f"{numbers['tokens_per_second'].value:,.0f}\n{100 * (row.over_fixed.value - 1):+.1f} ±{half:.1f}%",
        f"{numbers['user_tokens_per_second'].value:,.0f}",
        _quantiles(numbers, "token_ms"),
        _quantiles(numbers, "first_token_ms"),
        *(
            "\n".join(f"{numbers[name].value:.2f}" for name in pair)
            for pair in (("block_efficiency", "discard_rate"), ("draft_steps", "submitted"))
        ),
    ]


def _quantiles(numbers: Mapping[str, Interval], name: str) -> str:
    return "\n".join(f"{numbers[f'{name}_p{level}'].value:.1f}" for level in (50, 99))


def conclusions(tables: Sequence[LoadTable]) -> list[str]:
    """Return for every lossless policy up to which of the closed loops it is faster than the target alone."""
    closed = {table.requests: (table, table.alone) for table in tables if table.alone is not None}
    texts = []
    for row in tables[0].rows if closed else ():
        speeds = {number: table.row(row.family).numbers["tokens_per_second"].low for number, (table, _) in closed.items()}
        pays = sorted(number for number, (_, alone) in closed.items() if speeds[number] > alone)
        none = sorted(set(closed) - set(pays))
        if not pays:
            texts.append(f"{row.family}: never faster than the target alone.")
        else:
            after = f", not with {_list(none)}" if none else ""
            texts.append(f"{row.family}: faster than the target alone with {_list(pays)} requests at once{after}.")
    return texts


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def write_tables(tables: Sequence[LoadTable], context: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the tables as JSON, CSV and a page, and the Pareto front as PNG; return the paths."""
    from specheads.evaluation.serving.page import html_of  # imports plotly

    written = [folder / f"{NAME}.{suffix}" for suffix in ("json", "csv", "png", "html")]
    write_json(written[0], {"context": dict(context), "tables": [asdict(table) for table in tables]})
    rows = [{"load": table.load, "requests": table.requests} | asdict(row) for table in tables for row in table.rows]
    write_whole(written[1], lambda path: write_rows(rows, path))
    plot_front(tables, str(context["title"]), written[2])
    page = html_of(tables, conclusions(tables), context)
    write_whole(written[3], lambda path: path.write_text(page, encoding="utf-8"))
    return written


def plot_front(tables: Sequence[LoadTable], title: str, path: Path) -> None:
    """Plot total throughput against speed per user: a line for each policy, a point for each load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.6, 5.2), layout="constrained")
    for number, first in enumerate(tables[0].rows):
        rows = [table.row(first.family) for table in tables]
        x, y = ([row.numbers[name].value for row in rows] for name in ("user_tokens_per_second", "tokens_per_second"))
        dashed = "--" if not first.lossless else "-"
        axes.plot(x, y, dashed, marker="osD^vxP*"[number % 8], ms=4, lw=1.2, color=f"C{number % 10}", label=first.family)
    axes.set(xlabel="tokens per second and user", ylabel="tokens per second of all users", yscale="log")
    axes.set_title(f"{title}: upper right is better")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
