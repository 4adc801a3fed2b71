"""A few prompts decoded, so that predictions contain what decoding takes besides its steps."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from specheads.decoding.baseline import Baseline
from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.records import DecodeStats, Round
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.stopping import FixedLength
from specheads.evaluation.probe.prediction import Overheads
from specheads.pair import Pair
from specheads.sampling import Warp


@dataclass(frozen=True)
class LiveCheck:
    """What decoding some prompts took, with the target alone and with one fixed length, in turn."""

    num_prompts: int
    length: int  # drafted tokens
    alone_tokens_per_second: float
    tokens_per_second: float
    overheads: Overheads

    @property
    def speedup(self) -> float:
        """The speed-up of the fixed length over the target alone."""
        return self.tokens_per_second / self.alone_tokens_per_second


def live_check(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    warp: Warp,
    costs: StepCosts,
    length: int,
    max_new_tokens: int,
    engine: str = "auto",
    seed: int = 0,
) -> LiveCheck:
    """Decode prompts (ids) with the target alone and with a fixed length, and return what it took.

    Overheads are medians over rounds of what they took more than their steps.
    """
    decoder = SpeculativeDecoder(pair, stopping=FixedLength(length), warp=warp, engine=engine)
    alone = Baseline(pair, warp, decoder.target_engine)
    decoder.warm_up()
    alone.warm_up()
    stats: tuple[list[DecodeStats], list[DecodeStats]] = ([], [])
    rounds: tuple[list[Round], list[Round]] = ([], [])
    for number, prompt in enumerate(prompts):
        outs = alone.generate(prompt, max_new_tokens, seed + number), decoder.generate(prompt, max_new_tokens, seed + number)
        for place, out in enumerate(outs):
            stats[place].append(out.stats)
            rounds[place].extend(out.rounds)
    draft, verify = costs.draft_seconds, costs.verification
    more = [each.seconds - each.num_draft_calls * draft - verify[min(each.num_drafted, len(verify) - 1)] for each in rounds[1]]
    overheads = Overheads(
        round_seconds=max(0.0, statistics.median(more)),
        alone_seconds=max(0.0, statistics.median(each.seconds for each in rounds[0]) - costs.target_seconds),
    )
    speed_alone, speed = (DecodeStats.total(each).tokens_per_second for each in stats)
    return LiveCheck(len(prompts), length, speed_alone, speed, overheads)
