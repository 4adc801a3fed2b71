"""Several evaluations compared: the speed-up of each draft by itself, with the best rule without a head, and with a head.

The first is the present evaluation; the others are earlier reports of other drafts for the same target, prompts and warping.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from specheads.errors import UserError
from specheads.evaluation.candidates import FIXED, TARGET
from specheads.evaluation.conclusions import main_data_set
from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import DraftRow, Report
from specheads.storage.files import read_json

KINDS = {  # by name, whether a row of a report is of this kind
    "fixed length": lambda row: row["family"] == FIXED,
    "rule without a head": lambda row: row["family"] != FIXED and row["head"] is None,
    "head": lambda row: row["head"] is not None,
}


def read_report(location: str | Path) -> dict[str, Any]:
    """Return an earlier evaluation's report, of its run folder or of report.json itself.

    Raises:
        UserError: there is none, or it lacks something that is compared, which is said before an evaluation rather than after it.
    """
    path = Path(location)
    path = path / "report.json" if path.is_dir() else path
    try:
        content = read_json(path)
        _identity(content["context"])
        for number in range(len(content["data_sets"])):
            _rows(content, number), _sizes(content, number)
        return content
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    raise UserError(
        f"compare={location} holds no report of an evaluation; give run folders of specheads evaluate, for example "
        "'compare=[outputs/evaluate/<date_time>]'."
    )


def compared(report: Report, earlier: Mapping[str, Mapping[str, Any]]) -> list[DraftRow]:
    """Return the rows of this report and of earlier ones, by their location, on the first set of test prompts.

    Raises:
        UserError: an evaluation of another target, of other prompts, with other costs or another distribution.
    """
    number = main_data_set(report)
    if number is None:
        raise UserError("compare= needs replayed rules: verification=token and chains, and some of ratios= or live=winners.")
    ours = json.loads(json.dumps(asdict(report), default=str))
    rows = _rows(ours, number)
    for where, theirs in earlier.items():
        check_context(ours["context"], theirs, where)
        _check_same(_sizes(ours, number), _sizes(theirs, number), where)
        rows += _rows(theirs, number)
    return rows


def check_context(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    """Raise UserError, naming both sides, unless an earlier report has the target, costs and distribution of a context."""
    _check_same(_identity(ours), _identity(theirs["context"]), where)


def _identity(context: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that evaluations share if they can be compared; they may have heads with counted costs, or none."""
    if not isinstance(context["draft"], str):
        raise TypeError("the draft has no name")
    costs: Mapping[str, Any] = context["costs"]
    prompts: Mapping[str, Any] = next((each for each in context["prompts"].values() if each["role"] == "test"), {})
    shares = ", ".join(f"{share:g}" for share in sorted({*costs["head_shares"].values()}))
    python = f" of Python {prompts['python']}" if "python" in prompts else ""  # which decides the prompts of data=nano
    return {
        **{name: context.get(name) for name in ("target", "target_revision", "warp", "max_new_tokens", "verification")},
        "costs.verified_share": costs["verified_share"],
        **({"costs.head_share": "counted (null)" if costs["counted"] else shares} if shares else {}),
        "set of prompts": f"{prompts['num_prompts']} prompts of hash {prompts['sha256']}{python}",
    }


def _sizes(report: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the size of a data set, if there is one; the tokens are the target's, and do not depend on the draft."""
    sizes = [[data["name"], data["num_prompts"], data["num_tokens"]] for data in report["data_sets"][number : number + 1]]
    return {"test prompts (name, number, tokens)": sizes}


def _check_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    """Raise UserError for the first value that both sides have and that differs."""
    for name in ours:
        if name in theirs and ours[name] != theirs[name]:
            raise UserError(
                f"compare={where} cannot be compared with this evaluation: its {name} is {theirs[name]}, here it is "
                f"{ours[name]}; evaluate both with the same settings, data and split, and heads that left out the same prompts."
            )


def _rows(report: Mapping[str, Any], number: int) -> list[DraftRow]:
    """Return a row for each of KINDS that a report has."""
    data, draft = report["data_sets"][number], report["context"]["draft"]
    blocks = {(row["family"], row["name"]): row["block_efficiency"] for row in data["rules"]}
    # Without what was decoded under another verification rule.
    decoded = [row for row in report["live"] if row["family"] != TARGET and row["verification"] is None]
    live = [(row, Interval.of(row["tokens_per_second"])) for row in decoded]
    rows = []
    for kind, belongs in KINDS.items():
        winners = [row for row in data["winners"] if not row["bound"] and belongs(row)]
        best = {
            ratio: max((row for row in winners if row["ratio"] == ratio), key=itemgetter("dev_speedup"))
            for ratio in dict.fromkeys(row["ratio"] for row in winners)
        }
        if best:
            speeds = [speed for row, speed in live if belongs(row)]
            rows.append(
                DraftRow(
                    draft=draft,
                    kind=kind,
                    rules={ratio: row["name"] for ratio, row in best.items()},
                    block_efficiency={ratio: blocks[row["family"], row["name"]] for ratio, row in best.items()},
                    speedup={ratio: Interval.of(row["speedup"]) for ratio, row in best.items()},
                    tokens_per_second=max(speeds, key=lambda speed: speed.value, default=None),
                )
            )
    return rows
