"""The text of docs/results.md: which claims of the papers held here, by the files of the runs that
checked them.

`papers.yaml` lists every claim; `claims/*.json` are what `python -m benchmarks.papers` wrote; `measured_claims.yaml` holds figures that answer a claim, too. What needs
other hardware has its cost.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Claim = Mapping[str, Any]
HERE = Path(__file__).parent
FOLDER = HERE / "claims"
PAPERS = HERE / "papers.yaml"
MEASURED = HERE / "measured_claims.yaml"
# Of an H100: bytes per second that its memory gives, the share of it that decoding reaches, and its
# bytes.
BANDWIDTH = 3.35e12
REACHED = 0.6
MEMORY = 80e9
BYTES = 2  # bytes of a parameter in bfloat16
NOT_RUN = "not run here"
LARGE = "needs large GPUs"
UNAVAILABLE = "not checkable here"
NOTHING = "nothing to check"
ORDER = ("held", "held weakly", "did not hold", NOT_RUN, LARGE, UNAVAILABLE, NOTHING)


def _checked_claims() -> list[dict[str, Any]]:
    """Return all claims that were checked or left out, with the `command` that did it, and `where`:
    on which pair and prompts.

    The other fields are those of papers.claims.CheckedClaim; a claim that was left out has no
    `ours`.
    """
    checked = yaml.safe_load(MEASURED.read_text())
    for path in sorted(FOLDER.glob("*.json"), reverse=True):
        content = json.loads(path.read_text())
        claims = content.get("claims") or [
            claim for section in content.get("sections", ()) for claim in section["claims"]
        ]
        left_out = [claim | {"outcome": NOT_RUN} for claim in content.get("not_run", ())]
        checked = [
            claim | {"command": content["command"], "where": _where(content)}
            for claim in claims + left_out
        ] + checked
    return checked


def _where(content: Mapping[str, Any]) -> str:
    """Return the pair and the prompts of a run as text; nothing of the theory, which has none."""
    if "prompts" not in content:
        return ""
    prompts = content["prompts"]
    data = (
        ""
        if prompts["name"].startswith(content["model"]["name"])
        else f" of {prompts['name'].partition(',')[0]}"
    )
    split = f"{prompts['split']} " if not data else ""
    return f"{content['model']['name']}, {prompts['num_prompts']} {split}prompts{data}"


def _gpu_hours(cost: Mapping[str, Any]) -> tuple[float, int]:
    """Return the GPU-hours of decoding all prompts token by token, and the number of GPUs that hold
    both models.

    Each token reads the target's weights once, whatever number of GPUs shares them; speculation
    needs less.
    """
    tokens = cost["prompts"] * cost["tokens_per_prompt"] * cost["passes"]
    hours = tokens * BYTES * cost["target_parameters"] / (BANDWIDTH * REACHED) / 3600
    weights = BYTES * (cost["target_parameters"] + cost["draft_parameters"])
    return hours, math.ceil(1.2 * weights / MEMORY)


def page() -> str:
    """Return docs/results.md."""
    papers = yaml.safe_load(PAPERS.read_text())
    checked = _checked_claims()
    items = [item for paper in papers for item in paper["items"]]
    by_item: dict[str, list[Claim]] = {item["id"]: [] for item in items}
    commands: dict[str, set[str]] = {}
    for claim in checked:
        commands.setdefault(claim["command"], set()).update(claim["claims"])
        for name in claim["claims"]:
            if name not in by_item:
                raise ValueError(f"papers.yaml has no item {name!r}")
            by_item[name].append(claim)
    states = {item["id"]: _state(item, by_item[item["id"]]) for item in items}
    lines = [*_head(states)]
    for paper in papers:
        lines += [
            "",
            f"## {paper['title']}",
            "",
            f"{paper['authors']}; arXiv {paper['arxiv']}; {paper['venue']}.",
            "",
        ]
        lines += ["| where | claim | published | here | outcome |", "|---|---|---|---|---|"]
        lines += [_row(item, states[item["id"]], by_item[item["id"]]) for item in paper["items"]]
    lines += ["", "## Commands", "", "What checked a claim, and the claims that it answers.", ""]
    lines += [f"- `{command}`: {', '.join(sorted(names))}" for command, names in commands.items()]
    return "\n".join(lines) + "\n"


def _state(item: Mapping[str, Any], checked: Sequence[Claim]) -> str:
    """Return the outcome of an item: of several that were checked, the one that held least."""
    if checked:
        outcomes = {claim["outcome"] for claim in checked}
        return max(outcomes - {NOT_RUN} or outcomes, key=ORDER.index)
    return {"text": NOTHING, "large": LARGE, "unavailable": UNAVAILABLE}.get(item["how"], NOT_RUN)


def _head(states: Mapping[str, str]) -> Iterator[str]:
    """Yield what stands above the tables."""
    yield "# Claims of the papers"
    yield ""
    yield (
        "<!-- Written by `python benchmarks/render.py`; edit papers.yaml or measured_claims.yaml in"
        " benchmarks/papers instead. -->"
    )
    yield ""
    yield (
        "Every table, figure and theorem of the five papers, the numbers in their texts, and what"
        " became of each here. *Held*: the interval lies on the claimed side, or the equality holds"
        " to rounding. *Held weakly*: the estimate does, and the interval includes the opposite, or"
        " only some of the cases do. The embedded pairs are small (targets of 5 and 13 million"
        " parameters), so directions are compared, not digits. Brackets are 95 % intervals over"
        " prompts, of a ratio over the same prompts on both sides; every prompt is decoded once,"
        " greedily or with one seed. Where a claim is about speed, tokens per draft step are"
        " compared at a stated cost of the target's forward pass; speeds need a quiet machine, and"
        " what needs them is *not run*. A cost is that of decoding token by token on H100s at 60 %"
        " of their memory bandwidth."
    )
    yield ""
    yield "| outcome | claims |"
    yield "|---|---|"
    yield from (f"| {name} | {sum(state == name for state in states.values())} |" for name in ORDER)


def _row(item: Mapping[str, Any], state: str, checked: Sequence[Claim]) -> str:
    """Return the row of an item."""
    texts = []
    last = ""
    for claim in sorted(checked, key=lambda claim: claim["outcome"] == NOT_RUN):
        where = claim.get("where", "")
        if where and where != last:  # said once for the claims of one run
            texts.append(f"*{where}:*")
        last = where
        ratio = f" ({claim['ratio']:.2f} of it)" if claim.get("ratio") is not None else ""
        what, outcome = (
            (f"{claim['says']} ", f" {claim['outcome']}") if len(checked) > 1 else ("", "")
        )
        why = f". {claim['why']}" if claim.get("why") else ""
        texts.append(
            f"{what}{claim['ours']}{ratio}{outcome}{why}"
            if "ours" in claim
            else f"{claim['says']} *not run*"
        )
    if not checked and "cost" in item:
        hours, gpus = _gpu_hours(item["cost"])
        size = "under an hour" if hours < 1 else f"{hours:,.0f} GPU-hours"
        texts = [f"at most {size} on {gpus} H100{'s' if gpus > 1 else ''}"]
    published = item["published"] or ("not seen" if item.get("unverified") else "")
    cells = [item["place"], item["says"], published, "<br>".join(texts), state]
    return (
        "| "
        + " | ".join(
            " ".join(str(cell).split()).replace("|", "\\|").replace("](", "] (") for cell in cells
        )
        + " |"
    )
