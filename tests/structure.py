"""How the code is built: what its house rules forbid, counted, and its sizes.

    python -m tests.structure [revision] [--no-times]

counts the working tree, or an earlier state of it. tests/test_structure.py holds what must stay at zero.
"""

import argparse
import ast
import io
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.glossary import error_texts, help_texts, identifiers, in_identifiers, in_prose, names_of_files, yaml_keys

ROOT = Path(__file__).parents[1]
CODE = ("specheads", "data_gen", "train.py", "evaluate.py")
# Low to high: a module may import from its own layer and from those below. A name stands for the modules in it, too.
LAYERS = (
    ("specheads.errors", "specheads.forecast", "specheads.interrupts", "specheads.processes", "specheads.settings"),
    ("specheads.storage",),
    ("specheads.pair",),
    ("specheads.prompts",),
    ("specheads.heads",),
    ("specheads.decoding",),
    ("specheads.integrations",),
    ("specheads.replay", "data_gen"),
    ("specheads.evaluation",),
    ("specheads.training",),
    ("specheads.papers",),
    ("specheads",),  # the public names; a new module below it must be given a layer
    (*("train", "evaluate", "data_gen.__main__", "specheads.__main__", "specheads.commands"),),
)
DOOR = len(LAYERS) - 1
# Where modules of earlier states belong.
EARLIER = {
    "specheads.storage": ("specheads.storage.files", "specheads.runs", "specheads.tensor_shards"),
    "specheads.training": (
        *("specheads.distill", "specheads.loading", "specheads.checkpoints"),
        *(f"specheads.heads.{name}" for name in ("training", "module", "store", "bank", "stack", "share", "loss", "texts")),
    ),
    "specheads.commands": ("specheads.cli", "specheads.help", "specheads.loggers", "specheads.tool"),
}
HEAD_INPUTS = r'"(hidden|embedding|draft_prob|max_prob|entropy|index|target_hidden|\w*logprob\w*)"'  # in head.schema.json


def layer_of(module: str) -> int | None:
    """Return the number of a module's layer, or None if it has none."""
    layers = {name: number for number, names in enumerate(LAYERS) for name in names}
    earlier = {name: layers[place] for place, names in EARLIER.items() for name in names}
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in layers and (name != "specheads" or name == module):
            return layers[name]
        if name in earlier:
            return earlier[name]
    return None


@dataclass(frozen=True)
class Module:
    """A Python file."""

    path: Path  # relative to the root
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    @property
    def name(self) -> str:
        """Its name as imports write it."""
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Its functions and methods, nested ones too."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def imports(self) -> Iterator[str]:
        """Yield the full names that it imports, also inside functions: of `from a import b` that is a.b."""
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                yield from (f"{source}.{alias.name}" for alias in node.names)


@dataclass(frozen=True)
class State:
    """The files of the working tree or of an earlier revision."""

    root: Path

    def files(self, *places: str, suffixes: Sequence[str] = (".py",)) -> Iterator[Path]:
        """Yield the files in `places` with one of `suffixes`."""
        for place in places:
            top = self.root / place
            paths = [top] if top.is_file() else sorted(top.rglob("*"))
            yield from (path for path in paths if path.suffix in suffixes and path.is_file())

    def modules(self, *places: str) -> list[Module]:
        """Return the Python files in `places`."""
        return [Module(path.relative_to(self.root), path.read_text()) for path in self.files(*places)]

    @cached_property
    def code(self) -> list[Module]:
        """The modules of the packages and of the entry points."""
        return self.modules(*CODE)

    @cached_property
    def edges(self) -> dict[str, set[str]]:
        """The modules of the code that each of them imports."""
        known = {module.name for module in self.code}
        return {module.name: {_module_in(name, known) for name in module.imports()} - {"", module.name} for module in self.code}


def _module_in(name: str, known: set[str]) -> str:
    """Return the module that an imported name is or lies in, empty for another package."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def importers(state: State, package: str) -> list[str]:
    """Return the modules outside a package that import something of it."""
    start = f"{package}."
    return sorted(
        module
        for module, imported in state.edges.items()
        if not f"{module}.".startswith(start) and any(f"{name}.".startswith(start) for name in imported)
    )


def is_below_door(module: str) -> bool:
    """Return whether a module is no entry point."""
    return layer_of(module) != DOOR


def upward_imports(state: State) -> list[str]:
    """Return `importing -> imported` for imports from a higher layer, and modules that have no layer."""
    upward = []
    for module, imported in state.edges.items():
        if layer_of(module) is None:
            upward.append(f"{module} has no layer")
            continue
        upward += [f"{module} -> {name}" for name in sorted(imported) if (layer_of(name) or 0) > layer_of(module)]
    return upward


def circles(state: State) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reach: dict[str, set[str]] = {}
    for start in state.edges:
        todo, reach[start] = [start], set()
        while todo:
            new = state.edges[todo.pop()] - reach[start]
            reach[start] |= new
            todo += new
    groups = {frozenset(name for name in reach[module] if module in reach[name]) for module in reach if module in reach[module]}
    return sorted(sorted(group) for group in groups)


def config_modules(state: State) -> list[str]:
    """Return the modules below the door that import hydra or omegaconf."""
    return [
        module.name
        for module in state.code
        if is_below_door(module.name) and {name.split(".")[0] for name in module.imports()} & {"hydra", "omegaconf"}
    ]


def config_functions(state: State) -> list[str]:
    """Return the functions below the door that take a config."""
    functions = []
    for module in state.code:
        for function in module.functions if is_below_door(module.name) else ():
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            texts = [
                argument.arg + " " + (ast.unparse(argument.annotation) if argument.annotation else "") for argument in arguments
            ]
            if any(re.search(r"\bcfg\b|\bDictConfig\b", text) for text in texts):
                functions.append(f"{module.name}.{function.name}")
    return functions


def crossings(state: State) -> tuple[list[str], list[str]]:
    """Return the imports of data_gen by specheads and of specheads by data_gen, those of entry points left out."""
    pairs = [(module, name) for module, imported in state.edges.items() for name in sorted(imported) if is_below_door(module)]
    return tuple(
        [f"{a} -> {b}" for a, b in pairs if (a.split(".")[0], b.split(".")[0]) == ends]
        for ends in (("specheads", "data_gen"), ("data_gen", "specheads"))
    )


def checks(state: State) -> list[int]:
    """Return the number of lines of each function that checks values by hand."""
    return [length(f) for module in state.code for f in module.functions if re.match(r"_?check(ed)?(_|$)", f.name)]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function."""
    return node.end_lineno - node.lineno + 1


def fewest_files(state: State, patterns: Mapping[str, str]) -> tuple[int, str]:
    """Return in how few files one of `patterns` occurs, and its name.

    The thing that is named least often shows how many files a new one must be written into.
    """
    texts = [path.read_text() for path in state.files(*CODE, "conf", suffixes=(".py", ".yaml", ".json"))]
    counts = {name: sum(bool(re.search(pattern, text)) for text in texts) for name, pattern in patterns.items()}
    name = min((name for name in counts if counts[name]), key=lambda name: counts[name])
    return counts[name], name


def rule_patterns(state: State, group: str) -> dict[str, str]:
    """Return patterns for the rules of a config group: the class, and the file's name unless it is an ordinary word."""
    patterns = {}
    for path in state.files(f"conf/{group}", suffixes=(".yaml",)):
        if target := re.search(r"^_target_: .*\.(\w+)$", path.read_text(), re.MULTILINE):
            names = [target[1], path.stem if "_" in path.stem else rf"{group}={path.stem}"]
            patterns[path.stem] = rf"(?m)\b({'|'.join(names)})\b|^ *- {path.stem}$"
    return patterns


@cache
def replaced_words(state: State) -> dict[str, list[str]]:
    """Return the names and texts that use a word that the glossary replaces, by place."""
    code, tests = ([module.tree for module in state.modules(*places)] for places in ((*CODE, "benchmarks"), ("tests",)))
    configs = [path.read_text() for path in state.files("conf", suffixes=(".yaml",))]
    return {
        "identifiers": in_identifiers(identifiers(code)),
        "identifiers of tests": in_identifiers(identifiers(tests)),
        "config keys": in_identifiers(yaml_keys(configs)),
        "file names": in_identifiers(names_of_files(state.root, (*CODE, "conf", "benchmarks", "tests"))),
        "error messages": in_prose(error_texts(code)),
        "help": in_prose(help_texts(code, configs)),
    }


def seconds(root: Path, *arguments: str) -> float:
    """Return the shortest of three times that Python takes for a command in `root`."""
    environment = os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return min(times)


def counts(state: State, times: bool) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table."""
    files = [len(module.text.splitlines()) for module in state.code]
    functions = [length(function) for module in state.code for function in module.functions]
    to_data_gen, from_data_gen = crossings(state)
    yield "files: median, longest (lines)", f"{statistics.median(files):.0f}, {max(files)} of {len(files)}"
    yield "functions: median, longest (lines)", f"{statistics.median(functions):.0f}, {max(functions)} of {len(functions)}"
    yield "functions below the door that take a config", str(len(config_functions(state)))
    yield "modules below the door that import hydra or omegaconf", str(len(config_modules(state)))
    yield "imports from a higher layer, modules without a layer", str(len(upward_imports(state)))
    yield "imports of data_gen by specheads, of specheads by data_gen", f"{len(to_data_gen)}, {len(from_data_gen)}"
    groups = circles(state)
    yield "circles of imports (modules in them)", f"{len(groups)} ({sum(map(len, groups))})"
    yield "functions that check by hand, their lines", f"{len(checks(state))}, {sum(checks(state))}"
    for place, uses in replaced_words(state).items():
        yield f"replaced words in {place}", str(len(uses))
    for group in ("stopping", "verification"):
        count, name = fewest_files(state, rule_patterns(state, group))
        yield f"files that name a {group} rule, at least", f"{count} ({name})"
    schema = (state.root / "specheads" / "heads" / "head.schema.json").read_text()
    count, name = fewest_files(state, {name: rf"\b{name}\b" for name in re.findall(HEAD_INPUTS, schema)})
    yield "files that name a head's input, at least", f"{count} ({name})"
    if times:
        yield "seconds of import specheads", f"{seconds(state.root, '-c', 'import specheads'):.1f}"
        yield "seconds of train.py --help", f"{seconds(state.root, 'train.py', '--help'):.1f}"


@contextmanager
def state_of(revision: str | None) -> Iterator[State]:
    """Yield the working tree, or a revision's files in a temporary folder."""
    if revision is None:
        yield State(ROOT)
        return
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield State(Path(folder))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", help="of git; default: the working tree")
    parser.add_argument("--no-times", action="store_true", help="leave out the seconds")
    parser.add_argument("--list", action="store_true", help="also print what is counted")
    arguments = parser.parse_args(argv)
    with state_of(arguments.revision) as state:
        for name, value in counts(state, not arguments.no_times):
            print(f"{name:<62}{value:>20}")
        if arguments.list:
            for listed in (config_functions, config_modules, upward_imports, circles):
                print(f"\n{listed.__name__}", *listed(state), sep="\n    ")
            for place, uses in replaced_words(state).items():
                print(f"\nreplaced words in {place}", *sorted(set(uses)), sep="\n    ")


if __name__ == "__main__":
    main()
