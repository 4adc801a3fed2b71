"""Settings of engines without heads, by what an evaluation measured."""

import json
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
    reads_target: bool = False  # EAGLE-3

    @property
    def longest(self) -> int:
        return max(each.num_tokens for each in self.lengths)


def drafting_of(report: Json, ratio: str, num_tokens: int) -> EngineDrafting:
    """Return how an engine should draft by a `report.json` at one ratio of costs: the best fixed
    length, `num_tokens`, 0 without a draft; of batches, where drafts were faster decoded.

    Raises UserError where that is no draft at all.
    """
    lengths = _lengths_of_batches(report) or [DraftLength(1, num_tokens)]
    context = report["context"]
    made = EngineDrafting(
        str(context["draft"]),
        lengths,
        _least_probability(report, ratio),
        bool(context.get("draft_reads")),
    )
    if not made.longest:
        raise UserError(
            f"at ratio={ratio} no fixed length is clearly faster than the target alone: serve the"
            " target without a draft."
        )
    return made


def _least_probability(report: Json, ratio: str) -> float | None:
    """Return the draft's largest probability below which a draft best ends on dev prompts; None
    where a fixed length is faster.
    """
    fastest = dict[str, Json]()
    for data_set in report["data_sets"]:
        for row in data_set["rules"] if data_set["role"] == "dev" else ():
            family = row["family"]
            speed = row["speedup"].get(ratio)
            known = fastest.get(family)
            if speed and (not known or speed["value"] > known["speedup"][ratio]["value"]):
                fastest[family] = row
    limited = fastest.get("max_probability")
    fixed = fastest.get("fixed_length")
    if limited is None or fixed is None:
        return None
    if limited["speedup"][ratio]["value"] <= fixed["speedup"][ratio]["value"]:
        return None
    return float(limited["parameters"]["threshold"])


def _lengths_of_batches(report: Json) -> list[DraftLength]:
    lengths = []
    for table in report.get("batches", ()):
        for row in table["rows"]:
            if row["family"] == "fixed_length":
                num_tokens = row["parameters"]["num_tokens"] if row["over_alone"] > 1 else 0
                lengths.append(DraftLength(table["concurrency"], num_tokens))
    return sorted(lengths)


def _vllm(given: EngineDrafting) -> str:
    config: dict[str, object] = {
        "method": "eagle3" if given.reads_target else "draft_model",
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


def _check_alone(given: EngineDrafting) -> None:
    if given.reads_target:
        raise UserError(
            f"the draft {given.draft} reads its target, and settings for such drafts are known for"
            " format=vllm and format=sglang alone."
        )


def _tensorrt(given: EngineDrafting) -> str:
    _check_alone(given)
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
    _check_alone(given)
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
    algorithm = "EAGLE3" if given.reads_target else "STANDALONE"
    return (
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {given.draft} {steps}"
        " --speculative-eagle-topk 1"
    )


# By name the engine's version whose settings these are, and the function that returns them as text.
ENGINES: dict[str, tuple[str, Callable[[EngineDrafting], str]]] = {
    "vllm": ("vLLM 0.32", _vllm),
    "tensorrt-llm": ("TensorRT-LLM 1.3", _tensorrt),
    "llama.cpp": ("llama.cpp of 2026, llama-server", _llama),
    "sglang": ("SGLang 0.5.23", _sglang),
}
