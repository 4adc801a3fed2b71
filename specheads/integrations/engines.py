"""Settings of engines without heads, by what an evaluation measured."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from specheads.errors import UserError

Json: TypeAlias = Mapping[str, Any]


class DraftLength(NamedTuple):
    """How long drafts should be, up to a number of requests at once."""

    most_requests: int
    num_tokens: int  # 0: no draft


class EngineDrafting(NamedTuple):
    """How engines without heads should draft."""

    draft: str
    lengths: Sequence[DraftLength]  # ascending in requests
    # Of the draft's most likely token, below which a draft ends; None: fixed lengths are faster.
    least_probability: float | None

    @property
    def longest(self) -> int:
        return max(each.num_tokens for each in self.lengths)


def drafting_of(report: Json, ratio: str) -> EngineDrafting:
    """Return what a `report.json` found best on dev prompts at one ratio of costs.

    Of batches, where drafts were faster decoded.

    Raises UserError where it has no fixed lengths at this ratio, or none that is clearly faster
    than the target alone.
    """
    rules: list[Json] = []
    for data_set in report["data_sets"]:
        if data_set["role"] == "dev":
            rules += data_set["rules"]
    fixed = _fastest(rules, "fixed_length", ratio)
    if fixed is None:
        known = sorted({each for row in rules for each in row["speedup"]})
        raise UserError(
            f"ratio={ratio}: the report has no fixed lengths on dev prompts at it, expected one of"
            f" {', '.join(known)}."
        )
    speed = fixed["speedup"][ratio]
    lengths = _lengths_of_batches(report)
    if not lengths:  # as a report recommends: clearly faster
        lengths = [DraftLength(1, int(fixed["value"]) if speed["low"] > 1 else 0)]
    least = None
    by_probability = _fastest(rules, "max_probability", ratio)
    if by_probability is not None and by_probability["speedup"][ratio]["value"] > speed["value"]:
        least = float(by_probability["value"])
    made = EngineDrafting(str(report["context"]["draft"]), lengths, least)
    if not made.longest:
        raise UserError(
            f"at ratio={ratio} no fixed length is clearly faster than the target alone: serve the"
            " target without a draft."
        )
    return made


def _fastest(rules: Sequence[Json], family: str, ratio: str) -> Json | None:
    rows = [row for row in rules if row["family"] == family and ratio in row["speedup"]]
    return max(rows, key=lambda row: row["speedup"][ratio]["value"], default=None)


def _lengths_of_batches(report: Json) -> list[DraftLength]:
    lengths = []
    for table in report.get("batches", ()):
        for row in table["rows"]:
            if row["family"] == "fixed_length":
                (num_tokens,) = re.findall(r"num_tokens=(\d+)", row["name"])
                pays = row["over_alone"] > 1
                lengths.append(DraftLength(table["concurrency"], int(num_tokens) if pays else 0))
    return sorted(lengths)


def _vllm(given: EngineDrafting) -> str:
    config: dict[str, object] = {
        "method": "draft_model",
        "model": given.draft,
        "num_speculative_tokens": given.longest,
    }
    if len(given.lengths) > 1:
        bounds = []
        first = 1
        for last, num_tokens in given.lengths:
            bounds.append([first, last, num_tokens])
            first = last + 1
        config["num_speculative_tokens_per_batch_size"] = bounds
    return f"--speculative-config '{json.dumps(config)}'"


def _tensorrt(given: EngineDrafting) -> str:
    lines = [
        "speculative_config:",
        "decoding_type: Draft_Target",
        f"max_draft_len: {given.longest}",
        f"speculative_model: {json.dumps(given.draft)}",
    ]
    if len(given.lengths) > 1:
        lines.append("draft_len_schedule:  # up to so many requests, and none above")
        lines += [f"  {last}: {length}" for last, length in given.lengths if length]
    return "\n  ".join(lines)


def _llama(given: EngineDrafting) -> str:
    least = given.least_probability or 0.0
    return (
        f"--spec-type draft-simple --spec-draft-n-max {given.longest} --spec-draft-p-min {least:g} "
        " # and -md <draft.gguf>"
    )


def _sglang(given: EngineDrafting) -> str:
    steps = (
        f"--speculative-num-steps {given.longest} --speculative-num-draft-tokens"
        f" {given.longest + 1}"
    )
    return (
        f"--speculative-algorithm STANDALONE --speculative-draft-model-path {given.draft} {steps}"
        " --speculative-eagle-topk 1"
    )


# By name the engine's version whose settings these are, and the function that returns them as text.
ENGINES: dict[str, tuple[str, Callable[[EngineDrafting], str]]] = {
    "vllm": ("vLLM 0.32", _vllm),
    "tensorrt-llm": ("TensorRT-LLM 1.3", _tensorrt),
    "llama.cpp": ("llama.cpp of 2026, llama-server", _llama),
    "sglang": ("SGLang 0.5.23", _sglang),
}
