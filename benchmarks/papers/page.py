"""The text of docs/results.md: which claims of the papers held here, by the files of the runs that
checked them.

`papers.yaml` lists every claim; `claims/*.json` are what `python -m benchmarks.papers` wrote, now
or at the commit that the command names;
`measured_claims.yaml` holds figures that answer a claim, too. What needs other hardware has its
cost.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

Claim = Mapping[str, object]
Item = Mapping[str, object]
HERE = Path(__file__).parent
PAPERS = HERE / "papers.yaml"
# Of an H100: bytes per second that its memory gives, the share of it that decoding reaches, and its
# bytes.
BANDWIDTH = 3.35e12
REACHED = 0.6
MEMORY = 80e9
BYTES = 2  # bytes of a parameter in bfloat16
NOT_RUN = "not run here"
UNCHECKED = {  # by how an item would be checked
    "text": "nothing to check",
    "large": "needs large GPUs",
    "unavailable": "not checkable here",
}
ORDER = (
    "held",
    "held weakly",
    "did not hold",
    NOT_RUN,
    "needs large GPUs",
    "not checkable here",
    "nothing to check",
)
HEAD = """\
# Claims of the papers

<!-- Written by `python benchmarks/render.py`; edit papers.yaml or measured_claims.yaml in \
benchmarks/papers instead. -->

Every table, figure and theorem of the five papers, the numbers in their texts, and the outcome of \
each here. *Held*: the interval lies on the claimed side, or the equality holds to rounding. *Held \
weakly*: the estimate does, and the interval includes the opposite, or only some of the cases do. \
The embedded pairs are small (targets of 5 and 13 million parameters), so directions are compared, \
not digits. Brackets are 95 % intervals over prompts, of a ratio over the same prompts on both \
sides; every prompt is decoded once, greedily or with one seed. Where a claim is about speed, \
tokens per draft step are compared at a stated cost of the target's forward pass; speeds need a \
quiet machine, and what needs them is *not run*. A cost is that of decoding token by token on \
H100s at 60 % of their memory bandwidth.

| outcome | claims |
|---|---|"""


def page() -> str:
    """Return docs/results.md."""
    papers = yaml.safe_load(PAPERS.read_text())
    by_item: dict[str, list[Claim]] = {}
    for paper in papers:
        by_item |= {item["id"]: [] for item in paper["items"]}
    commands: dict[str, set[str]] = {}
    for claim in _checked_claims():
        commands.setdefault(claim["command"], set()).update(claim["claims"])
        for name in claim["claims"]:
            by_item[name].append(claim)
    counts = dict.fromkeys(ORDER, 0)
    tables = []
    for paper in papers:
        about = f"{paper['authors']}; arXiv {paper['arxiv']}; {paper['venue']}."
        tables += ["", f"## {paper['title']}", "", about, ""]
        tables += ["| where | claim | published | here | outcome |", "|---|---|---|---|---|"]
        for item in paper["items"]:
            state = _state(item, by_item[item["id"]])
            counts[state] += 1
            tables.append(_row(item, state, by_item[item["id"]]))
    lines = [HEAD, *(f"| {name} | {count} |" for name, count in counts.items()), *tables]
    lines += ["", "## Commands", "", "What checked a claim, and the claims that it answers.", ""]
    lines += [f"- `{command}`: {', '.join(sorted(names))}" for command, names in commands.items()]
    return "\n".join(lines) + "\n"


def _checked_claims() -> list[Claim]:
    """Return all claims that were checked or left out, with the `command` that did it, and `where`:
    on which pair and prompts.

    The other fields are those of measures.CheckedClaim; a claim that was left out has no `ours`.
    """
    checked = []
    for path in sorted((HERE / "claims").glob("*.json")):
        content = json.loads(path.read_text())
        more = {"command": content["command"], "where": _where(content)}
        checked += [claim | more for claim in content["claims"]]
        for claim in content.get("not_run", ()):
            checked.append(claim | more | {"outcome": NOT_RUN})
    return checked + yaml.safe_load((HERE / "measured_claims.yaml").read_text())


def _where(content: Mapping[str, Mapping[str, object]]) -> str:
    """Return the pair and the prompts of a run as text; nothing of the theory, which has none."""
    if "prompts" not in content:
        return ""
    pair = content["model"]["name"]
    prompts = content["prompts"]
    if prompts["name"].startswith(pair):
        return f"{pair}, {prompts['num_prompts']} {prompts['split']} prompts"
    return f"{pair}, {prompts['num_prompts']} prompts of {prompts['name'].partition(',')[0]}"


def _gpu_hours(cost: Mapping[str, float]) -> tuple[float, int]:
    """Return the GPU-hours of decoding all prompts token by token, and the number of GPUs that hold
    both models.

    Each token reads the target's weights once, whatever number of GPUs shares them; speculation
    needs less.
    """
    tokens = cost["prompts"] * cost["tokens_per_prompt"] * cost["passes"]
    hours = tokens * BYTES * cost["target_parameters"] / (BANDWIDTH * REACHED) / 3600
    weights = BYTES * (cost["target_parameters"] + cost["draft_parameters"])
    return hours, math.ceil(1.2 * weights / MEMORY)


def _state(item: Item, checked: Sequence[Claim]) -> str:
    """Return the outcome of an item: of several that were checked, the one that held least."""
    if not checked:
        return UNCHECKED.get(item["how"], NOT_RUN)
    outcomes = {claim["outcome"] for claim in checked}
    return max(outcomes - {NOT_RUN} or outcomes, key=ORDER.index)


def _row(item: Item, state: str, checked: Sequence[Claim]) -> str:
    """Return the row of an item."""
    texts = []
    last = ""
    for claim in sorted(checked, key=lambda claim: claim["outcome"] == NOT_RUN):
        where = claim.get("where", "")
        if where and where != last:  # said once for the claims of one run
            texts.append(f"*{where}:*")
        last = where
        texts.append(_found(claim, len(checked) > 1))
    if not checked and "cost" in item:
        hours, gpus = _gpu_hours(item["cost"])
        size = "under an hour" if hours < 1 else f"{hours:,.0f} GPU-hours"
        texts = [f"at most {size} on {gpus} H100{'s' if gpus > 1 else ''}"]
    published = item["published"] or ("not seen" if item.get("unverified") else "")
    cells = []
    for cell in (item["place"], item["says"], published, "<br>".join(texts), state):
        cells.append(" ".join(str(cell).split()).replace("|", "\\|").replace("](", "] ("))
    return f"| {' | '.join(cells)} |"


def _found(claim: Claim, is_one_of_several: bool) -> str:
    """Return what was found of a claim."""
    if "ours" not in claim:
        return f"{claim['says']} *not run*"
    text = claim["ours"]
    if claim.get("ratio") is not None:
        text += f" ({claim['ratio']:.2f} of it)"
    if is_one_of_several:
        text = f"{claim['says']} {text} {claim['outcome']}"
    return f"{text}. {claim['why']}" if claim.get("why") else text
