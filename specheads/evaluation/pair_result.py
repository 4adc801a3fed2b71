"""What an evaluation measured of a pair on a machine, in a few lines of JSON that others can send in and compare.

The schema is in pair_result.schema.json. Nothing in it names a folder of this machine: of local models the names remain.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specheads.errors import UserError
from specheads.storage.files import read_json, write_json

FORMAT, FILE = 1, "pair_result.json"
REPORT = "report.json"
OF_LIVE = ("name", "family", "lossless", "tokens_per_second", "speedup", "block_efficiency", "acceptance_rate")


def write_pair_result(report: str) -> str:
    """Write the result of an evaluation next to its report; return a message with its path.

    Args:
        report: the folder of the run, or its report.json.

    Raises:
        UserError: there is no report, or nothing was decoded.
    """
    path = Path(report) / REPORT if Path(report).is_dir() else Path(report)
    try:
        content = read_json(path)
        result = pair_result(content, datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat())
    except OSError as error:
        raise UserError(
            f"report={report}: {path} cannot be read ({error.strerror}); give a run folder of specheads evaluate."
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"report={report}: {path} is no report of specheads evaluate; give one of its run folders.") from None
    if not result["live"]:
        raise UserError(f"report={report}: nothing was decoded, so there is no speed to tell; evaluate without live=none.")
    write_json(path.parent / FILE, result)
    return f"{path.parent / FILE} written; send it in with a pull request that adds it to benchmarks/pairs/"


def pair_result(report: Mapping[str, Any], date: str) -> dict[str, Any]:
    """Return the result that a report's content holds."""
    context = report["context"]
    return {
        "format": FORMAT,
        "date": date,
        "pair": {
            "draft": _name(context["draft"]),
            "draft_revision": context.get("draft_revision"),
            "target": _name(context["target"]),
            "target_revision": context["target_revision"],
            "dtype": context["dtype"],
        },
        "machine": {name: context[name] for name in ("device", "threads", "versions")},
        "warp": context["warp"],
        "verification": context["verification"],
        "max_new_tokens": context["max_new_tokens"],
        "prompts": context["prompts"],
        "live": [{name: row[name] for name in OF_LIVE} for row in report["live"]],
        "doubts": report["doubts"],
    }


def _name(location: str) -> str:
    """Return a model's name without the folders of this machine; ids of the hub and embedded models stay as they are."""
    return Path(location).name if Path(location).is_absolute() or location.startswith((".", "outputs/")) else location
