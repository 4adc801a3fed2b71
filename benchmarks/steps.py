"""The seconds of the steps of which decoding consists, with all that follows a forward pass, and the bytes that they read.

`python -m benchmarks.gpu round` prints them, on any device and for any pair.
"""

import statistics
from collections.abc import Callable, Sequence

import torch

from specheads import SpeculativeDecoder
from specheads.decoding.step_times import now, step_times
from specheads.pair.language_model import LanguageModel

ALONE, DRAFT, DRAFT_WITH_HEAD = "target alone", "draft step", "draft step with head"


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.ones(2**26, device=device)
    copied = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: copied.copy_(source), device, 20)


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of a call, after two that are not timed."""
    taken = []
    for _ in range(2 + repeats):
        start = now(device)
        run()
        taken.append(now(device) - start)
    return statistics.median(taken[2:])


def weight_bytes(lm: LanguageModel) -> int:
    """Return the bytes of weights that a forward pass over one token reads."""
    table = lm.model.get_input_embeddings().weight
    tied = table is lm.output_embedding.weight
    return sum(weight.nbytes for weight in lm.model.parameters()) - (0 if tied else table.nbytes)


def seconds_of(decoder: SpeculativeDecoder, context: int, repeats: int, verified: Sequence[int]) -> dict[str, float]:
    """Return the median seconds of the steps of a decoder that stops by a head, by name."""
    drafted = [count - 1 for count in verified if count > 1]
    times = step_times(decoder, {"head": decoder.stopping}, context, repeats, drafted)
    costs = times.costs
    verifications = {f"verification of {count + 1}": costs.verification[count] for count in drafted}
    drafts = {DRAFT: costs.draft_seconds, DRAFT_WITH_HEAD: costs.draft_seconds + times.rules["head"].step_seconds}
    return {ALONE: costs.target_seconds} | verifications | drafts
