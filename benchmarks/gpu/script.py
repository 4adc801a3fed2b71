"""What all scripts share: options, the limit of eight minutes, and a JSON document that grows part by part.

A script is a list of parts. Each is measured, timed and kept before the next begins, so that a part that fails, or a kill, loses
nothing else.
"""

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.machine import Limits, description, limits_of
from specheads.errors import UserError
from specheads.language_model import checked_device
from specheads.storage.files import write_json

logger = logging.getLogger(__name__)

SECONDS = 460  # after which a script stops measuring and prints what it has; `python -m benchmarks.gpu` ends it at 480
Part = Callable[[], dict[str, Any]]  # returns what it measured; `goals` are values of GOALS by name


@dataclass(frozen=True)
class Setup:
    """Where a script measures, and whether with models so small that it only shows that the script works."""

    device: torch.device
    tiny: bool

    @property
    def engine(self) -> str:
        """The engine of decoding; compiling would take longer than a tiny model's measurement."""
        return "eager" if self.tiny else "auto"

    @property
    def dtype(self) -> str:
        """The type of the models."""
        return "float32" if self.device.type == "cpu" else "bfloat16"

    @property
    def repeats(self) -> int:
        """How often a step is timed."""
        return 2 if self.tiny else 20

    @cached_property
    def limits(self) -> Limits:
        """How fast the device could be."""
        return limits_of(self.device, 64 if self.tiny else 8192)


class TimeIsUp(BaseException):
    """The script has measured for as long as it may; no handler of ordinary errors may stop it."""


def run_script(name: str, documentation: str | None, parts: Callable[[Setup], Sequence[Part]], argv: Sequence[str] | None) -> int:
    """Measure all parts and print the JSON document; return the exit code, 1 where a part failed or time was up.

    Args:
        parts: returns what to measure, each named after its function.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.gpu.{name}", description=(documentation or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="also write the JSON there, after each part")
    arguments = parser.parse_args(argv)
    try:
        setup = Setup(torch.device(checked_device(arguments.device)), arguments.tiny)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    document = measured_document(name, setup, parts, arguments.keep)
    print(json.dumps(document, indent=2), flush=True)
    return int(not document["complete"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every script has."""
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--tiny", action="store_true", help="use models that take seconds, to see that the script works")


def measured_document(name: str, setup: Setup, parts: Callable[[Setup], Sequence[Part]], keep: Path | None) -> dict[str, Any]:
    """Return the document with all parts, which grows in the file `keep`."""
    start = time.perf_counter()
    document: dict[str, Any] = {"script": name, "device": str(setup.device), "tiny": setup.tiny, "complete": False}
    document |= {"seconds": 0.0, "machine": description(setup.device), "parts": {}}
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    try:
        document["limits"] = asdict(setup.limits)
        for part in parts(setup):
            document["parts"][part.__name__] = _content_of(part)
            document["seconds"] = round(time.perf_counter() - start, 1)
            _keep(document, keep)
        document["complete"] = all("failed" not in content for content in document["parts"].values())
    except TimeIsUp:
        document["stopped"] = f"after {SECONDS} seconds"
    finally:
        signal.alarm(0)
    _keep(document, keep)
    return document


def _content_of(part: Part) -> dict[str, Any]:
    """Return what a part measured and its seconds, or why it failed."""
    start = time.perf_counter()
    print(f"{part.__name__} ...", file=sys.stderr, flush=True)
    try:
        content = part()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    except Exception as error:  # whatever it is, the parts after it are worth measuring
        logger.exception("%s failed", part.__name__)
        content = {"failed": f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"}
    return content | {"seconds": round(time.perf_counter() - start, 1)}


def _keep(document: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, document)


def _stop(*_: object) -> None:
    raise TimeIsUp
