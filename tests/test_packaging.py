"""An installed wheel holds what a source tree does: pyproject.toml lists every package and every
file that is no Python.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import specheads

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETTINGS = PROJECT["tool"]["setuptools"]


def test_every_package_is_listed():
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in [
            *(ROOT / "specheads").rglob("__init__.py"),
            ROOT / "specheads" / "data_gen" / "__init__.py",
        ]
    }
    # In a source tree the configs are no package.
    assert set(SETTINGS["packages"]) - {"specheads.conf"} == packages
    assert (ROOT / "specheads" / "data_gen").samefile(
        ROOT / SETTINGS["package-dir"]["specheads.data_gen"]
    )


def test_the_notice_names_every_text_of_a_licence():
    named = {
        line for line in (ROOT / "NOTICE").read_text().splitlines() if line.startswith("licenses/")
    }
    assert named == {str(path.relative_to(ROOT)) for path in (ROOT / "licenses").iterdir()}


def test_every_other_file_is_listed():
    listed = {
        path
        for package, patterns in SETTINGS["package-data"].items()
        for pattern in patterns
        for path in (ROOT / SETTINGS["package-dir"].get(package, package.replace(".", "/"))).glob(
            pattern
        )
    }
    others = {
        path
        for path in (ROOT / "specheads").rglob("*.*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    others |= set((ROOT / "conf").rglob("*.yaml"))
    assert ROOT / "specheads" / "py.typed" in listed
    assert others <= listed


def test_public_names_are_imported_when_they_are_used():
    script = "import sys, specheads; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
    assert all(getattr(specheads, name) is not None for name in specheads.__all__)


# What a distribution is imported as, where that is not its name; accelerate is imported by
# transformers, for `device_map`.
MODULES = {"hydra-core": "hydra", "pyyaml": "yaml"}


def test_every_dependency_is_imported_by_the_package():
    imported = set()
    for path in [*(ROOT / "specheads").rglob("*.py"), *(ROOT / "data_gen").rglob("*.py")]:
        imported |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
    listed = [re.match(r"[\w-]+", line)[0] for line in PROJECT["project"]["dependencies"]]
    modules = {MODULES.get(name, name.replace("-", "_")) for name in listed} - {"accelerate"}
    assert modules <= imported
