"""The order of the rooms is that of docs/architecture.md: imports go down only, in no circles, and
below the door nothing knows Hydra.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("specheads", "data_gen", "train.py", "evaluate.py")
# What stands next to the last room, the commands.
ENTRY_POINTS = ["train", "evaluate", "specheads.data_gen.__main__", "specheads.__main__"]
NAME = re.compile(r"specheads(\.\w+)+(:\w+)?")  # a text that is nothing but the name of an import
PARENT = re.compile(r"(specheads(\.\w+)+)\.")  # the beginning of an f-string that makes such a name


def layers() -> dict[str, int]:
    """Return the number of the line of each room in the map, which is listed from low to high.

    A module may import from its own line and from those above it. A name stands for the modules in
    it, too; `specheads` for the public names.
    """
    drawn = (ROOT / "docs" / "architecture.md").read_text().partition("\nspecheads/\n")[2]
    listed = re.findall(r"^  ([\w./]+(?:, [\w./]+)*)", drawn.partition("\n```")[0], re.MULTILINE)
    found = {}
    for number, names in enumerate(listed):
        for name in names.split(", "):
            module = name.removesuffix("/").removesuffix(".py")
            found["specheads" if module == "__init__" else f"specheads.{module}"] = number
    return found | dict.fromkeys(ENTRY_POINTS, len(listed) - 1)


LAYER_OF = layers()
DOOR = LAYER_OF["train"]


def layer_of(module: str) -> int | None:
    """Return the number of a module's layer, or None if it has none."""
    name = module
    while name and (name not in LAYER_OF or (name == "specheads" and name != module)):
        name = name.rpartition(".")[0]
    return LAYER_OF.get(name)


def imports(name: str, is_package: bool, tree: ast.Module) -> Iterator[str]:
    """Yield the full names that a module imports, also inside functions: of `from a import b` that
    is a.b. A string that names a module imports it; an f-string that begins with a package, all
    in it.
    """
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and NAME.fullmatch(str(node.value)):
            yield node.value.partition(":")[0]
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            begin = PARENT.fullmatch(node.values[0].value)
            yield f"{begin[1]}.*" if begin else ""


class Tree:
    """The modules of a source tree."""

    def __init__(self, root: Path) -> None:
        self.modules: dict[str, ast.Module] = {}
        self.imported: dict[str, set[str]] = {}
        for top in (root / place for place in CODE):
            for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
                name = ".".join(path.relative_to(root).with_suffix("").parts)
                name = name.removesuffix(".__init__")
                if name.startswith("data_gen"):  # its package has a link to it
                    name = f"specheads.{name}"
                tree = ast.parse(path.read_text())
                self.modules[name] = tree
                self.imported[name] = set(imports(name, path.name == "__init__.py", tree))
        self.edges = {name: self._edges_of(name) for name in self.modules}

    def _edges_of(self, name: str) -> set[str]:
        found = set()
        for imported in self.imported[name]:
            if imported.endswith(".*"):
                found |= {each for each in self.modules if each.startswith(imported[:-1])}
            else:
                found.add(self._within(imported))
        return found - {"", name}

    def _within(self, name: str) -> str:
        """Return the module that an imported name is or lies in, empty for another package."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name

    def below_door(self) -> list[str]:
        """Return the modules that are no entry points."""
        return [name for name in self.modules if layer_of(name) != DOOR]

    def upward(self) -> list[str]:
        """Return `importing -> imported` for imports from a higher layer, and modules that have no
        layer.
        """
        found = [f"{module} has no layer" for module in self.edges if layer_of(module) is None]
        for module, names in self.edges.items():
            layer = layer_of(module)
            for name in sorted(names):
                if layer is not None and (layer_of(name) or 0) > layer:
                    found.append(f"{module} -> {name}")
        return found

    def importers(self, package: str) -> list[str]:
        """Return the modules outside a package that import something of it."""
        start = f"{package}."
        found = []
        for module, names in self.edges.items():
            is_outside = not f"{module}.".startswith(start)
            if is_outside and any(f"{name}.".startswith(start) for name in names):
                found.append(module)
        return sorted(found)

    def know_hydra(self) -> list[str]:
        """Return the modules below the door that import hydra or omegaconf, or have a function that
        takes a config.
        """
        found = []
        for name in self.below_door():
            nodes = list(ast.walk(self.modules[name]))
            taken = [ast.unparse(node) for node in nodes if isinstance(node, ast.arg)]
            packages = {one.split(".")[0] for one in self.imported[name]}
            if packages & {"hydra", "omegaconf"} or re.search(r"\b(cfg|DictConfig)\b", str(taken)):
                found.append(name)
        return found


@pytest.fixture(scope="module")
def tree():
    return Tree(ROOT)


def test_imports_go_down_only(tree):
    assert tree.upward() == []
    assert len(set(LAYER_OF.values())) > 12


def test_no_modules_import_each_other(tree):
    TopologicalSorter(tree.edges).prepare()


def test_specheads_below_the_door_does_not_import_data_gen(tree):
    importers = set(tree.importers("specheads.data_gen"))
    assert "specheads.commands.data" in importers
    assert importers & set(tree.below_door()) == {"specheads"}  # its public names


def test_evaluation_and_training_stand_side_by_side(tree):
    for room, other in (("evaluation", "training"), ("training", "evaluation")):
        importers = tree.importers(f"specheads.{room}")
        assert importers and not [name for name in importers if f".{other}." in name]


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples", "tests/gpu", "tests/vllm"])
def test_names_that_are_imported_elsewhere_exist(folder):
    """Also in what runs on other machines only, where a rename would show too late."""
    missing = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("specheads."):
                module = importlib.import_module(node.module)
                missing += [
                    f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and not importlib.util.find_spec(f"{node.module}.{alias.name}")
                ]
    assert missing == []


def test_configs_alone_name_the_papers_room(tree):
    assert tree.importers("specheads.papers") == []


def test_only_the_door_knows_hydra_and_configs(tree):
    assert tree.know_hydra() == []


def test_mistakes_of_structure_are_found(tmp_path):
    texts = {
        "specheads/errors.py": "from specheads.heads import head\n",
        "specheads/progress.py": "PLACES = {'a': 'specheads.load.busy'}\n",
        "specheads/load.py": "def get(a):\n    return import_module(f'specheads.heads.{a}')\n",
        "specheads/heads/__init__.py": "",
        "specheads/heads/head.py": "def train(cfg):\n    from specheads import errors\n",
        "specheads/unheard_of.py": "import omegaconf\n",
        "data_gen/run.py": "from . import label\n",
        "data_gen/label.py": "",
        "train.py": "import omegaconf\n\n\ndef main(config: 'DictConfig'): ...\n",
        "evaluate.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    small = Tree(tmp_path)
    assert small.upward() == [
        "specheads.unheard_of has no layer",
        "specheads.errors -> specheads.heads.head",
        "specheads.load -> specheads.heads.head",
        "specheads.progress -> specheads.load",
    ]
    with pytest.raises(CycleError):
        TopologicalSorter(small.edges).prepare()
    assert small.edges["specheads.progress"] == {"specheads.load"}
    assert small.edges["specheads.data_gen.run"] == {"specheads.data_gen.label"}
    assert small.know_hydra() == ["specheads.heads.head", "specheads.unheard_of"]
    assert small.importers("specheads.heads") == ["specheads.errors", "specheads.load"]
