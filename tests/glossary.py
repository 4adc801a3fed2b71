"""The words that the project's glossary replaces, and where they occur: identifiers, file names, config keys, errors, help."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# Words that are no part of an identifier, and no identifier of their own.
PARTS = {
    *("law", "laws", "judge", "judges", "judged", "judging", "judgement", "judgements", "forwards", "facts", "decisive"),
    *("draws", "owed", "meeting", "meetings", "fate", "fates", "twin", "twins", "tail", "tails", "room", "prices"),
    *("elder", "rehearse", "rehearsed", "truth", "foretold", "anew", "learnt", "likeliest", "mended", "beside", "behind"),
    *("unit", "units", "words"),
}
WHOLE = {"own", "one", "found", "told", "looks", "made_of", "identity", "program", "work"}
PROSE = re.compile(
    r"\b(laws?|judges?|judged|judging|forwards|facts|owed|fates|rehearsed?|foretold|anew|learnt|likeliest|mended|beside|behind"
    r"|elder|(gone|goes|go) on with|is no (count|number|whole|positive|list|text|set|name|path|split))\b|(?<!ground )\btruth\b"
)
# What identifiers keep, with the reason.
KEPT = {
    "ground_truth": "the field's word for what a prediction is compared with",
    "words": "of a text or a command line; a model's are tokens",
}


def snake_case(identifier: str) -> str:
    """Return the words of an identifier in lower case: `HeadScores` becomes `head_scores`."""
    return "_".join(word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier))


def in_identifiers(names: Iterable[str]) -> list[str]:
    """Return the names that use a replaced word, each as often as it occurs."""
    return [name for name in names if _is_replaced(snake_case(name))]


def _is_replaced(name: str) -> bool:
    for kept in KEPT:
        name = name.replace(kept, "")
    return name in WHOLE or bool(PARTS & set(name.split("_")))


def in_prose(texts: Iterable[str]) -> list[str]:
    """Return the texts that hold a replaced word."""
    return [text for text in texts if PROSE.search(text)]


def identifiers(trees: Iterable[ast.Module]) -> Iterator[str]:
    """Yield every name that the code defines: modules' aliases, classes, functions, parameters, variables, attributes."""
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    yield name
                case ast.arg(arg=name):
                    yield name
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    yield name
                case ast.alias(asname=str(name)):
                    yield name


def yaml_keys(texts: Iterable[str]) -> Iterator[str]:
    """Yield the keys of YAML files."""
    for text in texts:
        yield from re.findall(r"^\s*(?:- )?([A-Za-z_]\w*):", text, re.MULTILINE)


def names_of_files(root: Path, places: Sequence[str]) -> Iterator[str]:
    """Yield the names of files and folders in `places`, without suffixes."""
    for place in places:
        top = root / place
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if "__pycache__" not in path.parts:
                yield path.name.split(".")[0].replace("-", "_")


def error_texts(trees: Iterable[ast.Module]) -> Iterator[str]:
    """Yield the text of every `raise`, with values left out."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and node.exc is not None:
                yield " ".join(_strings(node.exc))


def help_texts(trees: Iterable[ast.Module], configs: Iterable[str]) -> Iterator[str]:
    """Yield what `--help` is made of: comments of configs, `help=` and the help of settings."""
    for text in configs:
        yield from re.findall(r"#\s*(.*)", text)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                helps = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
                is_setting = isinstance(node.func, ast.Name) and node.func.id == "setting"
                yield from (" ".join(_strings(value)) for value in [*helps, *(node.args[1:2] if is_setting else [])])


def _strings(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
