"""The settings of a probe, which import no torch."""

from specheads.decoding.keys import EngineName
from specheads.pair.generation_config import Warped
from specheads.settings import PositiveCount, PositiveNumber, Seed, setting


class Probe(Warped):
    """How much of a pair is looked at.

    The defaults take one to three minutes of CPU for the embedded pairs, with cold compilation.
    """

    seed: Seed = setting(0, "seed of everything that is sampled")
    engine: EngineName = setting(
        "auto", "how models are run while steps are timed: auto, eager, compiled, cuda_graph"
    )
    num_prompts: PositiveCount = setting(
        48, "prompts to record; half of them choose for the others"
    )
    max_new_tokens: PositiveCount = setting(
        512, "longest response, in tokens", config="${data.max_new_tokens}"
    )
    timing_seconds: PositiveNumber = setting(10.0, "time steps for at most so many seconds")
