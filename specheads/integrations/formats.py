"""What other decoders take: files of a head, written into its folder.

Settings of engines, by what an evaluation measured.
"""

import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from specheads.errors import UserError
from specheads.evaluation.report import Kind
from specheads.heads.calibration import IndexCalibration, calibrated
from specheads.heads.features import FEATURES, input_size
from specheads.heads.head import AcceptanceHead
from specheads.heads.portable import loaders
from specheads.storage.files import write_whole

TOLERANCE = 1e-5  # largest difference of an exported head's outputs, relative to outputs above one
BATCHES = (3, 1, 17)  # sizes that an export is tested with; it was traced with another

logger = logging.getLogger(__name__)


def write_onnx(head: AcceptanceHead, folder: Path) -> Path:  # pragma: no mutate block
    """Write `head.onnx`; return its path.

    Raises UserError for missing packages, or a graph that computes something else.

    Its inputs are the head's features by name, (batch, size) or (batch,) float32, and `index`
    (batch,) int64; its outputs are `logit` and `acceptance`, (batch,) each.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  what torch writes graphs with
    except ImportError as error:
        raise UserError(f"format=onnx needs {error.name}: pip install 'specheads[onnx]'.") from None
    path = folder / "head.onnx"
    names = [*_example_inputs(head, 1)[0], "index"]
    # It warns that torchvision is missing, which a head does not use.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns about its pytrees
        graph = torch.onnx.export(
            _traced(head), input_names=names, output_names=["logit", "acceptance"], verbose=False
        )
    assert graph is not None  # only torch's former exporter returns None

    def write(temporary: Path) -> None:
        graph.save(temporary)
        _check_same(
            head,
            onnxruntime.InferenceSession(temporary, providers=["CPUExecutionProvider"]),
            path.name,
        )

    write_whole(path, write)
    return path


class _CalibratedHead(nn.Module):
    """Features (B, size) or (B,) -> `logit` (B,) and `acceptance` (B,), calibrated by the token's
    `index` (B,) in its draft.
    """

    lines: Tensor  # (2, 1, indices), slopes and intercepts

    def __init__(self, head: AcceptanceHead) -> None:
        super().__init__()
        self.head = head
        fitted = IndexCalibration.from_dict(head.config.calibration)
        self.register_buffer("lines", torch.stack(fitted.rows(1, torch.device("cpu"))))

    def forward(self, features: Mapping[str, Tensor], index: Tensor) -> tuple[Tensor, Tensor]:
        logit = self.head(features)
        rows = self.lines.expand(-1, index.shape[0], -1)  # a view: a copy would fix the batch
        return logit, calibrated(logit, index, rows[0], rows[1]).sigmoid()


def _example_inputs(head: AcceptanceHead, batch: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return random inputs of a _CalibratedHead for `batch` tokens: features by name, and indices
    (batch,) long.
    """
    generator = torch.Generator().manual_seed(batch)
    features = dict[str, Tensor]()
    names = head.config.inputs
    sizes = [input_size([name], vars(head.config)) for name in names]
    # Vectors have the scale that the head was trained on; at another scale its outputs are far from
    # any that occur.
    scales = (tensor.cpu().split(sizes) for tensor in (head.input_mean, head.input_scale))
    for name, mean, scale in zip(names, *scales, strict=True):
        if FEATURES[name].size is None:
            features[name] = torch.rand(batch, generator=generator)
        else:
            features[name] = torch.randn(batch, len(mean), generator=generator) / scale + mean
    return features, torch.arange(batch) % 11


def _traced(head: AcceptanceHead) -> torch.export.ExportedProgram:  # pragma: no mutate block
    """Return a head with its calibration as a graph for batches of any size."""
    inputs = _example_inputs(head, 2)
    batch = torch.export.Dim("batch")
    shapes = {name: {0: batch} for name in inputs[0]}, {0: batch}
    return torch.export.export(_CalibratedHead(head).eval(), inputs, dynamic_shapes=shapes)


def _check_same(head: AcceptanceHead, session: Any, where: str) -> None:
    """Raise UserError unless an onnxruntime session computes what the head computes, on batches of
    several sizes.
    """
    original = _CalibratedHead(head)
    for batch in BATCHES:
        features, index = _example_inputs(head, batch)
        computed = session.run(
            None, {name: value.numpy() for name, value in {**features, "index": index}.items()}
        )
        with torch.no_grad():
            pairs = zip(map(torch.from_numpy, computed), original(features, index), strict=True)
        errors = [
            (actual - expected).abs() / expected.abs().clamp_min(1) for actual, expected in pairs
        ]
        difference = torch.cat(errors).max().item()  # NaN if one of them is
        if not difference < TOLERANCE:
            raise UserError(
                f"{where} differs from the head by {difference:.3g}, expected at most {TOLERANCE};"
                " use format=standalone, or another version of the exporter."
            )


# By name a sentence about what is written, and the function that writes it into a head's folder and
# returns its path.
FORMATS: dict[str, tuple[str, Callable[[AcceptanceHead, Path], Path]]] = {
    "standalone": (
        "acceptance_head.py, which needs torch and safetensors alone",
        lambda head, folder: loaders.write_loader(folder, loaders.STANDALONE),
    ),
    "onnx": ("head.onnx, for onnxruntime (pip install 'specheads[onnx]')", write_onnx),
}


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
    """Return how an engine should draft by the answer of a `report.json` at one ratio of costs: by
    the best fixed length, for engines have no other rules; of batches, where drafts were faster
    decoded.

    Raises UserError where the answer has no such ratio, or is the target alone.
    """
    comparison = comparison_at(report, ratio)
    fixed = comparison["choices"][Kind.FIXED]
    length = 0
    if comparison["use"] != Kind.ALONE:
        length = int(fixed["parameters"]["num_tokens"])
    lengths = _lengths_of_batches(report) or [DraftLength(1, length)]
    made = EngineDrafting(
        str(report["context"]["draft"]), lengths, _least_probability(report, ratio)
    )
    if not made.longest:
        raise UserError(
            f"at ratio={ratio} no fixed length is clearly faster than the target alone: serve the"
            " target without a draft."
        )
    return made


def comparison_at(report: Json, ratio: str) -> Json:
    """Return what the answer of a `report.json` says at one ratio of costs.

    Raises UserError for a ratio that it does not have.
    """
    answer = report["answer"]
    known = {each["ratio"]: each for each in (answer["comparison"], *answer["others"])}
    if ratio not in known:
        raise UserError(
            f"ratio={ratio}: the report has no answer at it, expected one of {', '.join(known)}."
        )
    return known[ratio]


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
