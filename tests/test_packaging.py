"""An installed wheel holds what a source tree does: pyproject.toml lists every package."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("specheads", "data_gen")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert listed - {"specheads.conf"} == packages  # in a source tree the configs are no package
