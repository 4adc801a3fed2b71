"""How the documentation is built: python -m sphinx -W docs docs/_build.

Pages of commands and tables of configs are made.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch
import yaml

import specheads
from specheads.commands import export
from specheads.commands.help import composed, read_head, sections, usage_head
from specheads.commands.verbs import VERBS
from specheads.data_gen.settings import DataGeneration
from specheads.pair.config import pair_config
from specheads.settings import config_folder
from specheads.storage.files import amount

project = "specheads"
copyright = "the specheads authors"
author = "the specheads authors"
version = release = specheads.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"specheads {version}"
exclude_patterns = ["_build", "commands/_*"]
default_role = "code"  # docstrings write code between single backticks
autodoc_typehints = "none"  # shapes and units are in the text
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
suppress_warnings = ["myst.header"]


def command_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of a page for every verb with a config."""
    for verb in VERBS.values():
        command = verb.config
        if command is None:
            continue
        cfg, chosen = composed(command)
        about = f"{verb.about[0].upper()}{verb.about[1:]}."
        lines = [f"# specheads {verb.name}", "", about, ""]
        lines += ["```bash", *usage_head(command), "```", ""]
        for section in sections(cfg, chosen, command):
            if section.rows:
                lines += [f"## {section.title}", "", section.description.replace("<", "\\<"), ""]
                lines += ["| key | what it is |", "|---|---|"]
                lines += [
                    f"| `{key.replace('|', chr(92) + '|')}` | {escaped(why)} |"
                    for key, why in section.rows
                ] + [""]
        yield verb.name, "\n".join(lines)


def escaped(text: str) -> str:
    """Return a sentence of help as Markdown."""
    for sign in "<*_|{[":
        text = text.replace(sign, f"\\{sign}")
    return text


def export_page() -> str:
    """Return the page of `specheads export`."""
    return f"# specheads export\n\n```text\n{export.help_text()}\n```\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def pair_table() -> str:
    """Return the table of the pairs on the hub: models, sizes, memory, licences."""
    rows = []
    known = yaml.safe_load((HERE / "published_models.yaml").read_text())
    for path in sorted((config_folder() / "model").glob("*.yaml")):
        config = pair_config(path.stem)
        models = [str(config.draft), str(config.target)]
        if known.keys() >= set(models):
            cells = [f"[{model}](https://huggingface.co/{model})" for model in models]
            sizes = [amount(known[model][0], "billion", "million") for model in models]
            memory = amount(
                sum(known[model][0] for model in models) * getattr(torch, config.dtype).itemsize,
                "GB",
                "MB",
            )
            licences = dict.fromkeys(known[model][1] for model in models)
            rows.append(
                [
                    f"`{path.stem}`",
                    cells[0],
                    sizes[0],
                    cells[1],
                    sizes[1],
                    memory,
                    "; ".join(licences),
                ]
            )
    return table(
        ["`model=`", "draft", "parameters", "target", "parameters", "memory of weights", "licence"],
        rows,
    )


def data_table() -> str:
    """Return the table of the prompt sets with a path, from the heads of their configs."""
    rows = []
    usual = DataGeneration().values()
    for path in sorted((config_folder() / "data").glob("*.yaml")):
        text = path.read_text()
        data = yaml.safe_load(text)
        if "path" in data:
            what, licence = read_head(text).splitlines()[:2]
            licence, address = licence.removeprefix("Licence: ").split(", ")
            counts = [f"{data[f'num_{split}']:,}" for split in ("train", "dev", "test")]
            limits = [
                f"{data.get(key, usual[key]):,}" for key in ("max_prompt_tokens", "max_new_tokens")
            ]
            rows.append(
                [
                    f"`{path.stem}`",
                    what,
                    " / ".join(counts),
                    " + ".join(limits),
                    f"[{licence}]({address})",
                ]
            )
    return table(
        [
            "`data=`",
            "what it is",
            "train / dev / test prompts",
            "tokens at most, prompt + response",
            "licence",
        ],
        rows,
    )


def write_commands() -> None:
    """Write the pages that commands.md lists, and the tables of pairs.md."""
    folder = HERE / "commands"
    folder.mkdir(exist_ok=True)
    pages = dict(command_pages()) | {
        "export": export_page(),
        "_pairs": pair_table(),
        "_data": data_table(),
    }
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text)


def add_arguments(
    app: object, what: str, name: str, each: object, options: object, lines: list[str]
) -> None:
    """Add the arguments of a plain dataclass, whose fields say what they are, to the lines of its
    docstring.
    """
    fields = getattr(each, "__dataclass_fields__", {}).items() if what == "class" else ()
    if meanings := {
        name: field.metadata["meaning"] for name, field in fields if "meaning" in field.metadata
    }:
        lines += ["Args:", *(f"    {name}: {meaning}." for name, meaning in meanings.items()), ""]


def setup(app: Any) -> None:
    """Have sphinx.ext.napoleon, which has a priority of 500, format what was added."""
    app.connect("autodoc-process-docstring", add_arguments, priority=400)


write_commands()
