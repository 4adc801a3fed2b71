"""The settings of a probe."""

from specheads.evaluation.settings import EngineName
from specheads.sampling import Warp
from specheads.settings import Built, PositiveCount, PositiveNumber, Seed, Settings, Text, setting


class Probe(Settings):
    """How much of a pair is looked at; the defaults take about five minutes for the embedded pairs, and cold compilation."""

    seed: Seed = setting(0, "seed of everything that is sampled")
    warp: Built[Warp] = setting(Warp(top_k=50), "how draft and target turn logits into probabilities")
    engine: EngineName = setting("auto", "how models are run while steps are timed: auto, eager, compiled, cuda_graph")
    prompts: Text | None = setting(
        None, "a file of prompts, with the templates of data= (for a pair of your own, data=alpaca); null: dev prompts of data="
    )
    num_prompts: PositiveCount = setting(48, "prompts to record; half of them choose for the others")
    num_live_prompts: PositiveCount = setting(4, "prompts to decode as a check")
    widths: tuple[PositiveCount, ...] | None = setting(
        None, "widths of the heads to time; null: a sixteenth of the draft's hidden size, an eighth and all of it"
    )
    context: PositiveCount = setting(256, "positions in memory while steps are timed")
    repeats: PositiveCount = setting(40, "times that each step is timed")
    num_samples: PositiveCount = setting(4, "acceptance samples of each response; more make smaller errors")
    batch_size: PositiveCount = setting(
        64, "rejected branches of the longest text that the draft reads together; fewer take less memory"
    )
    max_new_tokens: PositiveCount = setting(512, "longest response, in tokens")

    remote_url: Text | None = setting(
        None, "the address of a vLLM server that runs the target, for example http://localhost:8000", key="remote.url"
    )
    remote_model: Text | None = setting(None, "the server's name of the target; null: its first model", key="remote.model")
    remote_ratio: PositiveNumber | None = setting(
        None, "draft steps that a step of the target takes there; null: the ratio of their parameters", key="remote.ratio"
    )
    remote_requests: PositiveCount = setting(16, "requests that the server gets at the same time", key="remote.requests")
