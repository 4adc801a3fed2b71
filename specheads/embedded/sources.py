"""The sources of training text, and whether they still are what a pair is pinned to.

A manifest names every source with its version, licence, number of functions and one hash over their texts. The hash does not
depend on the order of functions; that follows from the seed.
"""

import hashlib
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from specheads.embedded import corpus
from specheads.embedded.corpus import Function

logger = logging.getLogger(__name__)

MOST_LINES = 12  # of an error that says what differs


class Row(TypedDict):
    """A source as a manifest and a card name it: the number of its functions, and one hash over their texts."""

    name: str
    version: str
    licence: str
    functions: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """The training functions of one distribution, or of the standard library."""

    name: str
    version: str
    licence: str
    functions: list[Function]

    @property
    def row(self) -> Row:
        """Its row in a manifest and a card."""
        texts = sorted(hashlib.sha256((function.prompt + function.body).encode()).digest() for function in self.functions)
        digest = hashlib.sha256(b"".join(texts)).hexdigest()
        return Row(name=self.name, version=self.version, licence=self.licence, functions=len(texts), sha256=digest)


def held_out_functions() -> dict[str, list[Function]]:
    """Return the functions that no pair is trained on, for `dev` and `test`."""
    return {split: list(corpus.standard_library(split)) for split in ("dev", "test")}


def training_sources(held_out: Mapping[str, Sequence[Function]]) -> list[Source]:
    """Return the sources on this machine without what is in `held_out`: the training side of the library, then dependencies."""
    seen = {function.key for functions in held_out.values() for function in functions}
    prompts = {function.prompt for functions in held_out.values() for function in functions}
    library = list(corpus.deduplicated(corpus.standard_library("train"), seen, prompts))
    sources = [Source("Python standard library", ".".join(map(str, sys.version_info[:3])), "PSF-2.0", library)]
    for distribution, licence in corpus.dependencies():
        files = corpus.distribution_files(distribution)
        functions = list(corpus.deduplicated(corpus.read_functions(files), seen, prompts))
        if functions:
            sources.append(Source(distribution.name, distribution.version, licence, functions))
            logger.info("%s %s (%s): %d functions", distribution.name, distribution.version, licence, len(functions))
    return sources


def shuffled_functions(sources: Sequence[Source], seed: int) -> list[Function]:
    """Return the functions of all sources in the order they are trained in."""
    functions = [function for source in sources for function in source.functions]
    random.Random(seed).shuffle(functions)
    return functions


def differences(pinned: Sequence[Row], installed: Sequence[Row]) -> list[str]:
    """Return one line per source that differs from the manifest in its functions or licence; versions may differ."""
    before, now = ({row["name"]: row for row in rows} for rows in (pinned, installed))
    lines = []
    for name in sorted(before.keys() | now.keys(), key=str.lower):
        if name not in now:
            old = before[name]
            lines.append(f"{name} {old['version']} is not installed or has no functions ({old['functions']:,} pinned)")
        elif name not in before:
            new = now[name]
            lines.append(f"{name} {new['version']} is not pinned ({new['functions']:,} functions found)")
        elif (before[name]["sha256"], before[name]["licence"]) != (now[name]["sha256"], now[name]["licence"]):
            lines.append(_change(before[name], now[name]))
    return lines


def _change(old: Row, new: Row) -> str:
    text = "{version} ({licence}) with {functions:,} functions"
    same = old["functions"] == new["functions"] and old["sha256"] != new["sha256"]
    return f"{new['name']}: {text.format(**new)}{' of other text' if same else ''}, pinned is {text.format(**old)}"
