"""What is each path of the CPU's engine worth? Steps with it and steps without it, in turn.

    python -m benchmarks.paths [--model mini] [--temperature 1] [--top-k 50] [--top-p 1]
        [--without token_at repeats layers all] [--seconds 20]

Figures are the medians of ratios of a draft step, and of a verification of five tokens, to those
of the whole engine; steps that are compared follow each other, so that other processes slow both
down. An untrained head of the default size reads every draft step. With AVX2 alone:
`ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2`. Each path's steps are compiled once.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn

from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp, load_pair
from specheads.decoding.engine.compiled import CompiledEngine, StepOperations
from specheads.decoding.engine.cpu import CpuOperations, CpuStep
from specheads.decoding.engine.reading import Operations, RowPlaces
from specheads.decoding.stopping import HeadThreshold
from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import Pair

PATHS = (
    "most_likely",
    "kth_largest",
    "nucleus",
    "token_at",
    "head_logits",
    "repeats",
    "layers",
    "all",
)
CONTEXT = 256  # positions in memory
IN_A_ROW = 4  # draft steps that are timed together
NUM_VERIFIED = 5


def operations_without(path: str) -> type[StepOperations]:
    """Return what steps compute with where one path is switched off; "all": torch alone."""
    if path == "all":
        return StepOperations
    operations: type[Operations] = CpuOperations
    if hasattr(CpuOperations, path):
        operations = type("OtherOperations", (CpuOperations,), {path: getattr(Operations, path)})

    class OtherStep(CpuStep):
        packs_layers = path != "layers"

        def __init__(
            self, lm: LanguageModel, modules: Sequence[nn.Module], few: bool, rows: bool
        ) -> None:
            super().__init__(lm, modules, few, rows)
            self.name = (self.name, "without", path)
            if path == "repeats":
                self.make_repeater = None

        def operations(self, places: RowPlaces | None) -> Operations:
            networks = {} if self.packed is None else self.packed.networks
            return operations(networks, places if self.reads_all_rows else None)

    return OtherStep


def decoder_without(path: str | None, pair: Pair, warp: Warp) -> SpeculativeDecoder:
    """Return a decoder whose steps lack a path, prepared; None: they lack nothing."""
    inputs = ("hidden", "embedding", "draft_prob", "max_prob", "entropy")
    config = HeadConfig(
        pair.draft_lm.hidden_size, depth=2, width=24, predicts="next_token", inputs=inputs
    )
    torch.manual_seed(0)
    head = AcceptanceHead(config).requires_grad_(False).eval()
    decoder = SpeculativeDecoder(
        pair, stopping=HeadThreshold(head, 1.0), warp=warp, engine="compiled"
    )
    for engine in (decoder.target_engine, decoder.draft_engine):
        assert isinstance(engine, CompiledEngine)
        if path is not None:
            engine.operations = operations_without(path)
    decoder.prepare()
    return decoder


@torch.no_grad()
def measure(pair: Pair, warp: Warp, paths: Sequence[str], seconds: float) -> None:
    """Print the cost of steps without each path, relative to steps with all."""
    whole = "with all paths"
    decoders = {whole: decoder_without(None, pair, warp)}
    decoders |= {path: decoder_without(path, pair, warp) for path in paths}
    steps = {}
    for path, decoder in decoders.items():
        steps[path, "draft"] = decoder.draft_steps(IN_A_ROW, CONTEXT)
        steps[path, "verification"] = decoder.verification_step(NUM_VERIFIED, CONTEXT)
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    order = random.Random(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for kind in ("draft", "verification"):
            for path in order.sample(list(decoders), len(decoders)):
                start = time.perf_counter()
                steps[path, kind]()
                taken[path, kind].append(time.perf_counter() - start)
    print(f"{pair.target_id}, {warp}, {torch.backends.cpu.get_cpu_capability()}")
    for path in decoders:
        for kind in ("draft", "verification"):
            both = zip(taken[path, kind], taken[whole, kind], strict=True)
            ratio = statistics.median(other / plain for other, plain in both)
            median = statistics.median(taken[path, kind]) / (IN_A_ROW if kind == "draft" else 1)
            print(f"{path:16} {kind:14} {1e6 * median:10.1f} us {ratio:7.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--without", nargs="+", choices=PATHS, default=["token_at", "repeats"])
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    warp = Warp(given.temperature, given.top_k, given.top_p)
    measure(load_pair(given.model), warp, given.without, given.seconds)


if __name__ == "__main__":
    main()
