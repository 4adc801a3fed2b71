"""The policies that a simulation compares, each with the values that are tried on dev prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from specheads.decoding.load.bandit import BatchSizeBandit
from specheads.decoding.load.costs import LoadCosts
from specheads.decoding.load.lengths import FixedK, FixedKByBatchSize, GoodputK
from specheads.decoding.load.load_aware import LoadAware, LoadBound
from specheads.decoding.load.plan import SurvivalSample
from specheads.decoding.load.policy import LoadPolicy
from specheads.decoding.load.pooled_logistic import PooledLogistic
from specheads.decoding.load.readout import ReadOut
from specheads.decoding.load.tetris import Tetris
from specheads.evaluation.serving.readouts import confidence_read_out, survival_sample
from specheads.replay.recording import Recording

FIXED, USUAL, BY_BATCH = "fixed K", "K = 7", "fixed K by batch size"
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10)
THRESHOLDS, MOST = (0.3, 0.5, 0.7, 0.85), (1, 2, 3, 6)  # of the pooled logistic; its longest drafts hold up the whole batch
DEPTHS = (1, 2, 3, 4, 5)
PER_REQUEST, TETRIS_DEPTHS = (0.5, 1.0, 2.0), (1, 2, 3, 5)  # tokens that TETRIS verifies, per request, and drafts

Value = tuple[float, ...]


@dataclass(frozen=True)
class Family:
    """Policies of one kind: `make` returns a new one for the values of its parameters and the number of requests of the load."""

    name: str
    make: Callable[[Value, int], LoadPolicy]
    values: Sequence[Value] = ((),)  # those that are tried
    lossless: bool = True


def families(dev: Recording, costs: LoadCosts, heads: Mapping[str, ReadOut], max_tokens: int) -> list[Family]:
    """Return all policies; what they fit, they fit to a recording of dev prompts.

    Args:
        heads: read-outs of look-ahead heads by name, with predictions in the recording.
        max_tokens: the longest draft of the policies that adapt.
    """
    read_outs: dict[str, ReadOut] = {"load-aware": confidence_read_out(dev)}
    read_outs |= {f"load-aware, {name}": read_out for name, read_out in heads.items()}
    samples = {name: survival_sample(dev, read_out, max_tokens) for name, read_out in read_outs.items()}
    confidence, sample = read_outs["load-aware"], samples["load-aware"]
    aware = [Family(name, partial(_aware, costs, read_out, samples[name], max_tokens)) for name, read_out in read_outs.items()]

    def pooled(value: Value, requests: int) -> LoadPolicy:
        return PooledLogistic(value[0], max_tokens=int(value[1]))

    def tetris(value: Value, requests: int) -> LoadPolicy:
        return Tetris(max(round(value[0] * requests), 1), int(value[1]))

    def bounded(make: Callable[[Value, int], LoadPolicy]) -> Callable[[Value, int], LoadPolicy]:
        return lambda value, requests: LoadBound(make(value, requests), costs, confidence, sample)

    depths, pooled_values = [(depth,) for depth in DEPTHS], list(product(THRESHOLDS, MOST))
    return [
        *without_features(costs, max_tokens),
        Family("pooled logistic", pooled, pooled_values),
        Family("TETRIS, lossy", tetris, list(product(PER_REQUEST, TETRIS_DEPTHS)), lossless=False),
        Family("pooled logistic, load bound", bounded(pooled), pooled_values),
        Family("fixed K, load bound", bounded(_fixed), depths),
        *aware,
    ]


def without_features(costs: LoadCosts, max_tokens: int) -> list[Family]:
    """Return the policies that look at no draft; for `max_tokens` see `families`."""
    return [
        Family(FIXED, _fixed, [(length,) for length in LENGTHS]),
        Family(USUAL, lambda value, requests: FixedK(7)),
        Family("goodput K", lambda value, requests: GoodputK(costs, max_tokens=max_tokens)),
        Family("bandit by batch size", lambda value, requests: BatchSizeBandit()),
    ]


def _fixed(value: Value, requests: int) -> LoadPolicy:
    return FixedK(int(value[0]))


def by_batch_size(lengths: Mapping[int, int]) -> Family:
    """Return the family of one policy: fixed lengths by number of requests, chosen on dev prompts."""
    return Family(BY_BATCH, lambda value, requests: FixedKByBatchSize(lengths))


def _aware(
    costs: LoadCosts, read_out: ReadOut, sample: SurvivalSample, max_tokens: int, value: float, requests: int
) -> LoadPolicy:
    return LoadAware(costs, read_out, sample, max_tokens)
