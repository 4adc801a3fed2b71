"""What is decoded in batches besides the rules of an evaluation, chosen and fitted on a recording of dev prompts."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specheads.decoding.batch.observation import ACCEPTANCE, OVERLAP, Observing
from specheads.decoding.load.costs import LoadCosts
from specheads.decoding.load.lengths import FixedK
from specheads.decoding.load.load_aware import LoadAware, LoadBound
from specheads.decoding.load.plan import SurvivalSample
from specheads.decoding.load.policy import MAX_TOKENS
from specheads.decoding.load.readout import HeadAcceptance, Predictor, ReadOut
from specheads.decoding.load.stopping_rule import UntilStopped
from specheads.decoding.stopping import FixedLength
from specheads.errors import UserError
from specheads.evaluation.candidate import FIXED, LOAD_AWARE, LOAD_BOUND, rule_fields
from specheads.evaluation.policies import Policies
from specheads.evaluation.serving.batch_sweep import BatchSetting
from specheads.evaluation.serving.candidates import Family
from specheads.evaluation.serving.readouts import confidence_read_out, read_out_of, survival_sample
from specheads.evaluation.serving.study import Load, best_value
from specheads.heads.head import AcceptanceHead
from specheads.replay.recording import Recording

logger = logging.getLogger(__name__)


def best_fixed(dev: Recording, costs: LoadCosts, lengths: Sequence[int], size: int) -> BatchSetting:
    """Return the fixed length with the highest throughput of `size` rows, simulated at these costs."""
    family = Family(FIXED, lambda value, requests: FixedK(int(value[0])), [(length,) for length in lengths])
    length = int(best_value(family, Load(size), dev, costs)[0])
    return BatchSetting(f"fixed K={length}", FIXED, FixedLength(length), rule_name=FIXED)


@dataclass(frozen=True)
class Predictions:
    """What a policy on the load predicts acceptance with, fitted on dev prompts."""

    title: str
    read_out: ReadOut
    sample: SurvivalSample
    head: AcceptanceHead | None  # that the read-out asks


def predictions(dev: Recording, heads: Mapping[str, AcceptanceHead], max_tokens: int = MAX_TOKENS) -> Predictions:
    """Return the predictions of the first head that a policy can ask, else those of the draft's confidence.

    Args:
        heads: by name, with predictions in the recording; the preferred one comes first.
    """
    name, head = next(((name, head) for name, head in heads.items() if _can_be_asked(name, head)), (None, None))
    recorded, title = confidence_read_out(dev), LOAD_AWARE
    if head is not None:
        recorded = read_out_of(dev, head)
        title = f"{LOAD_AWARE}, {name}" if len(heads) > 1 else f"{LOAD_AWARE}, head"
    sample = survival_sample(dev, recorded, max_tokens)
    return Predictions(title, ReadOut(_live(recorded.before), _live(recorded.after)), sample, head)


def load_aware(predicted: Predictions, costs: LoadCosts, max_tokens: int = MAX_TOKENS) -> BatchSetting:
    """Return the policy that knows the load."""
    policy = LoadAware(costs, predicted.read_out, predicted.sample, max_tokens)
    return BatchSetting(predicted.title, LOAD_AWARE, policy=policy, asked=predicted.head)


def bounded(setting: BatchSetting, predicted: Predictions, costs: LoadCosts) -> BatchSetting:
    """Return a stopping rule of whose drafts only those tokens are verified that are worth it at this load."""
    assert setting.rule is not None
    policy = LoadBound(UntilStopped(setting.rule.max_tokens), costs, predicted.read_out, predicted.sample)
    title, family = f"{setting.name}, {LOAD_BOUND}", f"{setting.family}, {LOAD_BOUND}"
    return BatchSetting(title, family, setting.rule, policy, predicted.head, **rule_fields(setting))


def by_load(policies: Policies, rules: Sequence[BatchSetting], predicted: Predictions, costs: LoadCosts) -> list[BatchSetting]:
    """Return the settings that know the load; `rules` are those that may be bounded."""
    settings: list[BatchSetting] = []
    for choice in policies.values():
        if choice.cls is LoadBound:
            settings += [bounded(rule, predicted, costs) for rule in rules]
        else:
            settings.append(load_aware(predicted, costs, **choice.arguments))
    return settings


def longest_draft(policies: Policies) -> int:
    """Return the longest draft of policies that choose its length."""
    return max((choice.arguments.get("max_tokens", MAX_TOKENS) for choice in policies.values()), default=MAX_TOKENS)


def _can_be_asked(name: str, head: AcceptanceHead) -> bool:
    """Return whether a policy on the load can ask a head; the log says why not."""
    obstacle = "it predicts a token only after the draft has read it" if head.config.predicts != "next_token" else None
    if obstacle is None:
        try:
            Observing([ACCEPTANCE], 1, head)
        except UserError as error:
            obstacle = str(error)
    if obstacle is not None:
        logger.info("the load-aware policy does not ask head %s: %s", name, obstacle)
    return obstacle is None


def _live(predictor: Predictor) -> Predictor:
    """Return a predictor that reads a head's logits as the decoder names them, and not as a recording does."""
    if isinstance(predictor, HeadAcceptance):
        return replace(predictor, name=ACCEPTANCE if predictor.reads_token else OVERLAP)
    return predictor
