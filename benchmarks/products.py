"""What does a forward pass over several tokens cost in a model's linear maps, next to one over a single token?

    python benchmarks/products.py [--models nano 21M 300M] [--repeats 30]

All linear maps of a model are computed once, with random weights, in three ways: as they are, by `torch.nn.functional.linear`;
packed by oneDNN, as Inductor freezes weights; packed for this project's operator (`specheads/decoding/engine/kernels/`).
Packed maps that read the same input are one map. In each repeat every way computes all numbers of tokens, in random order and
after a run that is not timed, so that weights come from where a decoder's do. Prints medians, and their ratios to those of one
token.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, text_of, write_result
from specheads.decoding.engine.operators import load_operators, pack, packed_linear

TOKENS = (1, 2, 3, 5, 9, 12, 21, 32)
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model of the Llama family."""

    layers: int
    hidden: int
    queries: int  # numbers in all queries of a token
    keys: int  # and in all its keys
    intermediate: int
    vocab: int

    def groups(self) -> Iterator[tuple[Sequence[int], int]]:
        """Yield, for maps that read the same input, their numbers of outputs and the number of inputs."""
        for _ in range(self.layers):
            yield (self.queries, self.keys, self.keys), self.hidden
            yield (self.hidden,), self.queries
            yield (self.intermediate, self.intermediate), self.hidden
            yield (self.hidden,), self.intermediate
        yield (self.vocab,), self.hidden

    @property
    def num_weights(self) -> int:
        """Return the number of weights that a token reads."""
        return sum(sum(outputs) * inputs for outputs, inputs in self.groups())


MODELS = {
    "nano": Shape(layers=6, hidden=256, queries=256, keys=128, intermediate=768, vocab=2048),
    "21M": Shape(layers=8, hidden=448, queries=448, keys=448, intermediate=1280, vocab=2048),
    "300M": Shape(layers=24, hidden=1024, queries=1024, keys=512, intermediate=2816, vocab=32000),
}

Group = list[Tensor]  # the weights (O, I) of maps that read the same input
Way = Callable[[dict[int, Tensor]], None]  # from inputs (T, I), by I


def plain_way(groups: Sequence[Group]) -> Way:
    def compute(inputs: dict[int, Tensor]) -> None:
        for group in groups:
            for weight in group:
                linear(inputs[weight.shape[1]], weight)

    return compute


def onednn_way(groups: Sequence[Group]) -> Way:
    sizes = [group[0].shape[1] for group in groups]
    packed = [torch.ops.mkldnn._reorder_linear_weight(torch.cat(group)) for group in groups]

    def compute(inputs: dict[int, Tensor]) -> None:
        for size, weight in zip(sizes, packed, strict=True):
            torch.ops.mkldnn._linear_pointwise(inputs[size], weight, None, "none", [], "")

    return compute


def operator_way(groups: Sequence[Group]) -> Way:
    shapes = [(group[0].shape[1], sum(len(weight) for weight in group)) for group in groups]
    packed = [pack(torch.cat(group)) for group in groups]

    def compute(inputs: dict[int, Tensor]) -> None:
        for (size, num_rows), panels in zip(shapes, packed, strict=True):
            packed_linear(inputs[size], panels, None, num_rows)

    return compute


WAYS = {"plain linear": plain_way, "oneDNN, packed": onednn_way, "this operator": operator_way}


def seconds_of(ways: dict[str, Way], inputs: dict[int, dict[int, Tensor]], repeats: int) -> dict[str, list[float]]:
    """Return the median seconds of each way for each number of tokens, which are the keys of `inputs`."""
    taken = {name: {count: [] for count in inputs} for name in ways}
    for _ in range(repeats):
        for name, compute in ways.items():
            compute(inputs[1])
            for count in random.sample(list(inputs), len(inputs)):
                start = time.perf_counter()
                compute(inputs[count])
                taken[name][count].append(time.perf_counter() - start)
    return {name: [statistics.median(seconds) for seconds in counts.values()] for name, counts in taken.items()}


def measure(shape: Shape, dtype: torch.dtype, repeats: int) -> dict[str, list[float]]:
    """Return the median seconds of each way for each of TOKENS."""
    groups = [[torch.randn(number, size).to(dtype) for number in outputs] for outputs, size in shape.groups()]
    sizes = {size for _, size in shape.groups()}
    inputs = {count: {size: torch.randn(count, size).to(dtype) for size in sizes} for count in TOKENS}
    return seconds_of({name: way(groups) for name, way in WAYS.items()}, inputs, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--repeats", type=int, default=30)
    add_result_option(parser, "products")
    arguments = parser.parse_args()
    if not load_operators():
        parser.error("the operators cannot be built here")
    torch.manual_seed(0)
    random.seed(0)
    times, ratios = [], []
    for model in arguments.models:
        for name in arguments.types:
            for way, seconds in measure(MODELS[model], TYPES[name], arguments.repeats).items():
                times.append([model, name, way, *seconds])
                ratios.append([model, name, way, *(each / seconds[0] for each in seconds[1:])])
    tables = tables_of(times, ratios, f"median of {arguments.repeats}")
    for table in tables:
        print(f"{table.title}\n\n{text_of(table)}\n")
    weights = [f"{model} {MODELS[model].num_weights / 1e6:.1f} million" for model in arguments.models]
    write_result(arguments.result, tables, seeds=[0], notes=f"Weights that a token reads: {', '.join(weights)}.")


def tables_of(times: Sequence[Sequence], ratios: Sequence[Sequence], how: str) -> list[Table]:
    heads = [Column("model"), Column("type"), Column("way")]
    counts = [f"{count} token{'s' * (count > 1)}" for count in TOKENS]
    return [
        Table("times", f"All linear maps of a model once, {how}", [*heads, *(Column(name, "ms:2") for name in counts)], times),
        Table(
            "ratios",
            f"Time over that of one token, {how}",
            [*heads, *(Column(name, "ratio:2") for name in counts[1:])],
            ratios,
        ),
    ]


if __name__ == "__main__":
    with torch.no_grad():
        main()
