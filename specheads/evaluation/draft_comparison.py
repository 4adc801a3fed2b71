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
from specheads.evaluation.candidates import FIXED
from specheads.evaluation.conclusions import main_data_set
from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import DraftRow, Report
from specheads.storage.files import read_json

# Evaluations that can be compared have the same values of these, and the same test prompts. The tokens are those of the target's
# responses, which do not depend on the draft.
SAME = ("target", "target_revision", "warp", "max_new_tokens", "verification")
PROMPTS_OF = itemgetter("name", "num_prompts", "num_tokens")
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
        for number in range(len(content["data_sets"])):
            _rows(content, number)
            PROMPTS_OF(content["data_sets"][number])
        _check_entries(content["context"])
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
        sets = [PROMPTS_OF(data) for data in (ours["data_sets"][number], *theirs["data_sets"][number : number + 1])]
        _check_same("test prompts (name, number, tokens)", sets[0], sets[1] if len(sets) > 1 else None, where)
        rows += _rows(theirs, number)
    return rows


def check_context(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    """Raise UserError, naming both sides, unless an earlier report has the target, costs and distribution of a context."""
    context = theirs["context"]
    for name in SAME:
        _check_same(name, ours.get(name), context.get(name), where)
    if context.get("costs") is None:
        raise UserError(
            f"compare={where} cannot be compared with this evaluation: it does not say which costs it counts, because it was "
            "made before heads had any; evaluate it again."
        )
    _check_same("costs.verified_share", ours["costs"]["verified_share"], context["costs"]["verified_share"], where)
    if ours["costs"]["head_shares"] and context["costs"]["head_shares"]:
        _check_same("costs.head_share", _head_share(ours["costs"]), _head_share(context["costs"]), where)
    prompts = [_reported(each) for each in (context, ours)]  # reports that do not name theirs are compared by PROMPTS_OF
    if None not in prompts and prompts[0]["sha256"] != prompts[1]["sha256"]:
        described = [
            f"{each['num_prompts']} prompts of hash {each['sha256']}"
            + (f" of Python {each['python']}" if "python" in each else "")
            for each in prompts
        ]
        raise UserError(
            f"compare={where} cannot be compared with this evaluation: its prompts are {described[0]}, here they are "
            f"{described[1]}; evaluate both with the same data and split, with heads that left out the same prompts, and "
            "data=nano under the same Python."
        )


def _check_entries(context: Mapping[str, Any]) -> None:
    """Raise an error unless a context has what is compared, or nothing of it."""
    if (costs := context.get("costs")) is not None:
        _head_share(costs), costs["verified_share"]
    if (prompts := _reported(context)) is not None:
        prompts["sha256"], prompts["num_prompts"]
    if not isinstance(context["draft"], str):
        raise TypeError("the draft has no name")


def _reported(context: Mapping[str, Any]) -> Any:
    """Return the provenance of the first prompts of a report that rules were not tuned on; None where it has none."""
    return next((prompts for prompts in context.get("prompts", {}).values() if prompts["role"] == "test"), None)


def _head_share(costs: Mapping[str, Any]) -> str:
    """Return whether the costs of heads were counted or given, and the given ones, as text."""
    return "counted (null)" if costs["counted"] else ", ".join(f"{share:g}" for share in sorted({*costs["head_shares"].values()}))


def _check_same(name: str, ours: Any, theirs: Any, where: str) -> None:
    if ours != theirs:
        raise UserError(
            f"compare={where} cannot be compared with this evaluation: its {name} is {theirs}, here it is {ours}; evaluate "
            "both with the same settings."
        )


def _rows(report: Mapping[str, Any], number: int) -> list[DraftRow]:
    """Return a row for each of KINDS that a report has."""
    data, draft = report["data_sets"][number], report["context"]["draft"]
    blocks = {(row["family"], row["name"]): row["block_efficiency"] for row in data["rules"]}
    # Without what was decoded under another verification rule.
    decoded = [row for row in report["live"] if row["family"] != "target" and row["verification"] is None]
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
