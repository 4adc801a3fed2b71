"""Where training text comes from, and whether it is still the text that a pair is pinned to.

A manifest names every source with its version, licence, number of functions and one hash over their texts. The hash does not
depend on the order of functions; that follows from the seed.
"""

import hashlib
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specheads.embedded import corpus
from specheads.embedded.corpus import Function

logger = logging.getLogger(__name__)

Row = Mapping[str, str | int]  # name, version, licence, functions, sha256
MOST_LINES = 12  # of an error that says what differs


@dataclass(frozen=True)
class Source:
    """The training functions of one distribution, or of the standard library."""

    name: str
    version: str
    licence: str
    functions: list[Function]

    @property
    def row(self) -> dict[str, str | int]:
        """The source as a manifest and a card name it."""
        texts = sorted(hashlib.sha256((function.prompt + function.body).encode()).digest() for function in self.functions)
        row = {"name": self.name, "version": self.version, "licence": self.licence, "functions": len(texts)}
        return row | {"sha256": hashlib.sha256(b"".join(texts)).hexdigest()}


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
        found = list(corpus.deduplicated(corpus.read_functions(files), seen, prompts))
        if found:
            sources.append(Source(distribution.name, distribution.version, licence, found))
            logger.info("%s %s (%s): %d functions", distribution.name, distribution.version, licence, len(found))
    return sources


def shuffled_functions(sources: Sequence[Source], seed: int) -> list[Function]:
    """Return the functions of all sources in the order they are trained in."""
    functions = [function for source in sources for function in source.functions]
    random.Random(seed).shuffle(functions)
    return functions


def differences(pinned: Sequence[Row], found: Sequence[Row]) -> list[str]:
    """Return one line per source whose functions or licence are not the pinned ones; a version alone makes no difference."""
    before, now = ({row["name"]: row for row in rows} for rows in (pinned, found))
    lines = []
    for name in sorted(before.keys() | now.keys(), key=str.lower):
        old, new = before.get(name), now.get(name)
        if new is None:
            lines.append(f"{name} {old['version']} is not installed or gives no function ({old['functions']:,} pinned)")
        elif old is None:
            lines.append(f"{name} {new['version']} is not pinned ({new['functions']:,} functions found)")
        elif (old["sha256"], old["licence"]) != (new["sha256"], new["licence"]):
            text = "{version} ({licence}) with {functions:,} functions"
            same = old["functions"] == new["functions"] and old["sha256"] != new["sha256"]
            lines.append(f"{name}: {text.format(**new)}{' of other text' if same else ''}, pinned is {text.format(**old)}")
    return lines
