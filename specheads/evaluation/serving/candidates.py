"""The policies that a simulation compares, each with the values that are tried on dev prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from specheads.decoding.load.bandit import BatchSizeBandit
from specheads.decoding.load.costs import LoadCosts
from specheads.decoding.load.lengths import FixedK, FixedKByBatchSize, GoodputK
from specheads.decoding.load.load_aware import LoadAware, LoadBound
from specheads.decoding.load.plan import SurvivalSample
from specheads.decoding.load.policy import LoadPolicy
from specheads.decoding.load.pooled_logistic import PooledLogistic
from specheads.decoding.load.readout import ReadOut
from specheads.decoding.load.tetris import Tetris
from specheads.evaluation.serving.readouts import confidence_read_out, head_read_out, survival_sample
from specheads.replay.recording import Recording
from specheads.replay.replay import RecordedHead

FIXED, USUAL, BY_BATCH = "fixed K", "K = 7", "fixed K by batch size"
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10)
THRESHOLDS = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9)
DEPTHS = (1, 2, 3, 4, 5)
PER_REQUEST = (0.5, 1.0, 2.0, 3.0)  # tokens that TETRIS verifies, per request


@dataclass(frozen=True)
class Family:
    """Policies of one kind: `make` returns a new one for a value and the number of requests of the load."""

    name: str
    make: Callable[[float, int], LoadPolicy]
    values: Sequence[float] = (0,)  # one value: nothing is chosen
    lossless: bool = True


def families(dev: Recording, costs: LoadCosts, heads: Mapping[str, RecordedHead], max_tokens: int) -> list[Family]:
    """Return all policies; what they fit, they fit to a recording of dev prompts.

    Args:
        heads: look-ahead heads by name, with predictions in the recording.
        max_tokens: the longest draft of the policies that adapt.
    """
    read_outs: dict[str, ReadOut] = {"load-aware": confidence_read_out(dev)}
    read_outs |= {f"load-aware, {name}": head_read_out(dev, head) for name, head in heads.items()}
    samples = {name: survival_sample(dev, read_out, max_tokens) for name, read_out in read_outs.items()}
    confidence, sample = read_outs["load-aware"], samples["load-aware"]
    aware = [Family(name, partial(_aware, costs, read_out, samples[name], max_tokens)) for name, read_out in read_outs.items()]

    def bounded_logistic(value: float, requests: int) -> LoadPolicy:
        return LoadBound(PooledLogistic(value, max_tokens=max_tokens), costs, confidence, sample)

    def bounded_length(value: float, requests: int) -> LoadPolicy:
        return LoadBound(FixedK(int(value)), costs, confidence, sample)

    return [
        Family(FIXED, lambda value, requests: FixedK(int(value)), LENGTHS),
        Family(USUAL, lambda value, requests: FixedK(7)),
        Family("goodput K", lambda value, requests: GoodputK(costs, max_tokens=max_tokens)),
        Family("bandit by batch size", lambda value, requests: BatchSizeBandit()),
        Family("pooled logistic", lambda value, requests: PooledLogistic(value, max_tokens=max_tokens), THRESHOLDS),
        Family(
            "TETRIS, lossy",
            lambda value, requests: Tetris(max(round(value * requests), 1), min(max_tokens, 5)),
            PER_REQUEST,
            lossless=False,
        ),
        Family("pooled logistic, load bound", bounded_logistic, THRESHOLDS),
        Family("fixed K, load bound", bounded_length, DEPTHS),
        *aware,
    ]


def by_batch_size(lengths: Mapping[int, int]) -> Family:
    """Return the family of one policy: fixed lengths by number of requests, chosen on dev prompts."""
    return Family(BY_BATCH, lambda value, requests: FixedKByBatchSize(lengths))


def _aware(
    costs: LoadCosts, read_out: ReadOut, sample: SurvivalSample, max_tokens: int, value: float, requests: int
) -> LoadPolicy:
    return LoadAware(costs, read_out, sample, max_tokens)
