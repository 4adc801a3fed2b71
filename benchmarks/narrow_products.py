"""Up to how many tokens are plain loops faster than BLAS?

    python benchmarks/narrow_products.py

One process; for each shape of a weight (out x in) twelve of them are multiplied in turn, so that they come from where a model's
weights come from. Prints BLAS's time over the loops' (`specheads/decoding/engine/narrow.py`), medians of interleaved repeats.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, text_of, write_result
from specheads.decoding.engine.narrow import narrow_linear

SHAPES = ((256, 256), (768, 256), (256, 768), (2048, 256), (432, 160), (2048, 2048))
TOKENS = (1, 2, 3, 5, 9, 16, 21, 32)
NUM_WEIGHTS, REPEATS = 12, 40


def blas(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [linear(x, weight) for weight in weights]


def loops(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [narrow_linear(x, weight) for weight in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_result_option(parser, "narrow_products")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        weights, ratios = [torch.randn(shape) for _ in range(NUM_WEIGHTS)], []
        torch._dynamo.reset()
        compiled = torch.compile(loops, fullgraph=True, options={"cpp.enable_floating_point_contract_flag": "fast"})
        for tokens in TOKENS:
            x = torch.randn(1, tokens, shape[1])
            if tokens > 1:
                torch._dynamo.mark_dynamic(x, 1)
            taken = {blas: [], compiled: []}
            for _ in range(REPEATS):
                for way, seconds in taken.items():
                    start = time.perf_counter()
                    way(x, weights)
                    seconds.append(time.perf_counter() - start)
            ratios.append(statistics.median(taken[blas][5:]) / statistics.median(taken[compiled][5:]))
        rows.append([f"{shape[0]} x {shape[1]}", *ratios])
    columns = [Column("weight"), *(Column(f"{tokens} token{'s' * (tokens > 1)}", "ratio:1") for tokens in TOKENS)]
    table = Table("ratios", f"BLAS's time over that of loops, median of {REPEATS}", columns, rows)
    print(f"{table.title}\n\n{text_of(table)}")
    write_result(arguments.result, [table], seeds=[0])


if __name__ == "__main__":
    with torch.no_grad():
        main()
