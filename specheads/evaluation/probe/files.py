"""A probe as files: probe.html and probe.json."""

from pathlib import Path

from specheads.evaluation.probe.probe import Probed
from specheads.storage.files import write_json, write_whole

NAME = "probe"


def write_probe(probed: Probed, folder: Path) -> list[Path]:
    """Write the probe as a page and as JSON; return the paths."""
    from specheads.evaluation.probe.page import html_of  # imports jinja

    written = [folder / f"{NAME}.{suffix}" for suffix in ("html", "json")]
    write_whole(written[0], lambda path: path.write_text(html_of(probed), encoding="utf-8"))
    write_json(written[1], probed.to_dict())
    return written
