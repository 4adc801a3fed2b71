"""How the documentation is built: python -m sphinx -W docs docs/_build. Pages of commands are written from their help."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import specheads
from specheads.commands import head_tool
from specheads.commands.help import PROGRAMS, composed, explanations, sections, usage_head
from specheads.commands.main import CONFIGURED

project, copyright, author = "specheads", "the specheads authors", "the specheads authors"
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
napoleon_google_docstring, napoleon_numpy_docstring = True, False
suppress_warnings = ["myst.header"]


def command_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of a page for every verb with a config."""
    for verb, entry in CONFIGURED.items():
        if entry.words:
            continue
        command = import_module(entry.module).main
        cfg, chosen = composed(command.name)
        lines = [f"# {PROGRAMS[command.name]}", "", f"{entry.about[0].upper()}{entry.about[1:]}.", ""]
        lines += ["```bash", *usage_head(command.name), "```", ""]
        for section in sections(command.name, cfg, chosen, explanations(cfg, command.classes(cfg))):
            if section.rows:
                lines += [f"## {section.title}", "", section.description.replace("<", "\\<"), ""]
                lines += ["| key | what it is |", "|---|---|"]
                lines += [f"| `{key.replace('|', chr(92) + '|')}` | {escaped(why)} |" for key, why in section.rows] + [""]
        yield verb, "\n".join(lines)


def escaped(text: str) -> str:
    """Return a sentence of help as Markdown."""
    for sign in "<*_|{[":
        text = text.replace(sign, f"\\{sign}")
    return text


def head_page() -> str:
    """Return the page of the verbs for heads."""
    return f"# Verbs for heads\n\n```text\n{head_tool.help_text()}\n```\n"


def write_commands() -> None:
    """Write the pages that commands.md lists."""
    folder = HERE / "commands"
    folder.mkdir(exist_ok=True)
    pages = dict(command_pages()) | {"heads": head_page()}
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text)


write_commands()
